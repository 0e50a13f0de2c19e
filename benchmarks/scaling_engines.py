"""Several engines behind the router beside one alone, and one engine over two GPUs.

    python benchmarks/scaling_engines.py --gpus 4 --work FOLDER --out engines.json
    python benchmarks/scaling_engines.py --device cpu --gpus 2 --work FOLDER --out engines.json

Half as many engines as GPUs, two at least, and where two further GPUs are free a tensor-parallel
engine there; on two GPUs it starts when the others have ended. The producer of a fully async run
asks them through a router process, as in ``engine_throughput.py``: C requests at once for each
engine, answers of one length. By turns the table of the router names one engine or all of them.

A row says output tokens/s, their ratio to as many engines of which each is as fast as the one
alone, and each engine's share of the tokens (of the requests, as all answers are of one length).
The row of the tensor-parallel engine is for information.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from client_process import Load
from engine_throughput import ask_producer
from live_engine import (
    INFO_TIMEOUT_S,
    STOP_GRACE_S,
    add_arguments,
    describe_machine,
    make_idle,
    order_of,
    prepare,
    random_prompts,
    run_spec,
    settle,
)

from activities.wire.client import EngineClient
from configs.run import RunSpec
from workers.actors.allocator import return_freed_memory
from workers.actors.engine import server_command
from workers.engines.process import ServerProcess
from workers.sources.model import PreparedModel

SIBLINGS = 8
SPARE_WAVES = 6
"""The producer begins more groups than are counted; these keep it from repeating a prompt."""
TURN_DEADLINE_S = 180.0
TENSOR_PARALLEL = 2
TOKENS = "sglang:generation_tokens_total{"
QWEN3_06B = {
    "hidden_size": 1024,
    "num_layers": 28,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_positions": 40960,
    "warmup_accuracy": 0.0,
}


def main() -> None:
    """Measure and write; the file grows by every row."""
    told = arguments()
    asyncio.run(measure(told))


def arguments() -> argparse.Namespace:
    """Options, with what depends on the device filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--gpus", type=int, required=True, help="of this host")
    parser.add_argument("--engines", type=int, help="default: half as many as GPUs, at least 2")
    parser.add_argument("--engine", choices=["native", "sglang"], help="default: native on CPU")
    parser.add_argument("--concurrency", type=int, help="of one engine; default: 128, on CPU 16")
    parser.add_argument("--prompt-tokens", type=int, help="default: 128, on CPU 32")
    parser.add_argument("--new-tokens", type=int, help="default: 256, on CPU 32")
    parser.add_argument("--waves", type=int, default=3, help="collections that count in a turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each")
    parser.add_argument("--no-tensor-parallel", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    settle(told)
    told.cpu = told.device == "cpu"
    told.engine = told.engine or ("native" if told.cpu else "sglang")
    told.engines = told.engines or max(2, told.gpus // 2)
    told.concurrency = told.concurrency or (16 if told.cpu else 128)
    told.prompt_tokens = told.prompt_tokens or (32 if told.cpu else 128)
    told.new_tokens = told.new_tokens or (32 if told.cpu else 256)
    told.tensor_parallel = not (told.cpu or told.no_tensor_parallel)
    if told.concurrency % SIBLINGS:
        parser.error(f"--concurrency must be a multiple of {SIBLINGS}")
    return told


async def measure(told: argparse.Namespace) -> None:
    """Rows of one engine, of all, and of the tensor-parallel one."""
    return_freed_memory()  # as the producer's actor does
    result: dict[str, Any] = {"machine": describe_machine(), "cpu": told.cpu, "rows": []}
    model = prepare(spec_for(told, told.work / "model", engines=1))
    alone = list(range(told.engines))
    beside = [told.engines + place for place in range(TENSOR_PARALLEL)]
    is_room = told.tensor_parallel and beside[-1] < told.gpus
    async with AsyncExitStack() as stack:
        singles = stack.enter_async_context(engines_of(told, model, [[each] for each in alone]))
        pair = stack.enter_async_context(engines_of(told, model, [beside] if is_room else []))
        urls, paired = await asyncio.gather(singles, pair)
        await compare(told, model, urls, result)
        if is_room:
            await add_pair(told, model, paired, result)
    if told.tensor_parallel and not is_room:
        async with engines_of(told, model, [[0, 1]]) as paired:
            await add_pair(told, model, paired, result)


async def compare(
    told: argparse.Namespace, model: PreparedModel, urls: Sequence[str], result: dict[str, Any]
) -> None:
    """One engine and all of them by turns."""
    sides: dict[int, list[dict[str, Any]]] = {1: [], len(urls): []}
    for turn in range(told.rounds):
        for count, rows in sides.items():
            rows.append(await ask(told, model, urls[:count], turn))
    one = _middle(sides[1])
    for count, rows in sides.items():
        rate = _middle(rows)
        shares = [
            statistics.mean(each) for each in zip(*(row["shares"] for row in rows), strict=True)
        ]
        add(
            told,
            result,
            {
                "engines": count,
                "tensor_parallel": 1,
                "tokens_per_s": rate,
                "ratio": rate / (count * one),
                "shares": shares,
                "turns": [row["tokens_per_s"] for row in rows],
            },
        )


async def add_pair(
    told: argparse.Namespace, model: PreparedModel, urls: Sequence[str], result: dict[str, Any]
) -> None:
    """The row of the tensor-parallel engine."""
    rows = [await ask(told, model, urls, 1000 + turn) for turn in range(told.rounds)]
    one = result["rows"][0]["tokens_per_s"]
    rate = _middle(rows)
    row = {"engines": 1, "tensor_parallel": TENSOR_PARALLEL, "tokens_per_s": rate}
    turns = [each["tokens_per_s"] for each in rows]
    add(told, result, {**row, "ratio": rate / one, "shares": [1.0], "turns": turns})


def add(told: argparse.Namespace, result: dict[str, Any], row: dict[str, Any]) -> None:
    """Keep a row: what comes after it may fail."""
    load = {"concurrency": told.concurrency, "prompt": told.prompt_tokens, "new": told.new_tokens}
    result["rows"].append({**row, **load})
    told.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["rows"][-1]), flush=True)


async def ask(
    told: argparse.Namespace, model: PreparedModel, urls: Sequence[str], turn: int
) -> dict[str, Any]:
    """Tokens/s of one turn, and each engine's share of the tokens."""
    concurrency = told.concurrency * len(urls)
    groups = concurrency // SIBLINGS
    prompts = random_prompts(
        groups * (told.waves + 1 + SPARE_WAVES), told.prompt_tokens, model.vocab_size, seed=turn
    )
    load = Load(concurrency, told.waves, SIBLINGS, told.new_tokens, prompts)
    for url in urls:
        client = EngineClient(url)
        await make_idle(client)
        await client.aclose()
    root = told.work / f"turn-{turn}-{len(urls)}"
    spec = spec_for(told, root, engines=len(urls), batch=groups)
    before = [await generated(url) for url in urls]
    async with asyncio.timeout(TURN_DEADLINE_S):
        row: dict[str, Any] = await ask_producer(spec, model, urls, load, told.work)
    made = [await generated(url) - count for url, count in zip(urls, before, strict=True)]
    return {**row, "shares": [count / sum(made) for count in made]}


def spec_for(
    told: argparse.Namespace, root: Path, *, engines: int, batch: int = 1, parallel: int = 1
) -> RunSpec:
    """A fully async run of ``engines`` engines, ``batch`` groups a collection."""
    sections: dict[str, dict[str, Any]] = {
        "training": {
            "num_rollouts": 1000,
            "rollout_batch_size": batch,
            "samples_per_prompt": SIBLINGS,
        },
        "core": {"publication_mode": "refresh"},
        "inference": {
            "max_response_length": told.new_tokens,
            "num_engines": engines,
            "tensor_parallel_size": parallel,
        },
        "async": {"fully_async": True},
    }
    if told.model == "tiny" and not told.cpu:
        sections["model"] = {"tiny": QWEN3_06B}
    return run_spec(
        told,
        root,
        engine=told.engine,
        context=told.prompt_tokens + told.new_tokens,
        slots=told.concurrency,
        sglang={"enable_metrics": True} if told.engine == "sglang" else None,
        **sections,
    )


@asynccontextmanager
async def engines_of(
    told: argparse.Namespace, model: PreparedModel, devices: Sequence[Sequence[int]]
) -> AsyncIterator[list[str]]:
    """Addresses of one engine on each set of GPUs; all start at once and end with the block."""
    starts = []
    for gpus in devices:
        spec = spec_for(told, told.work / "model", engines=1, parallel=len(gpus))
        order = order_of(spec, "engine", told.work).model_copy(
            update={"rank": gpus[0], "gpus": () if told.cpu else tuple(map(str, gpus))}
        )
        command = server_command(order, spec, model.path, 0)
        starts.append(ServerProcess.start(command, spec.inference.start_timeout_s))
    begun = await asyncio.gather(*starts, return_exceptions=True)
    servers = [each for each in begun if isinstance(each, ServerProcess)]
    try:
        for failed in begun:
            if isinstance(failed, BaseException):
                raise failed
        yield [server.url for server in servers]
    finally:
        await asyncio.gather(*(server.stop(STOP_GRACE_S) for server in servers))


async def generated(url: str) -> float:
    """Output tokens of an engine since its start, by its own counter."""
    async with httpx.AsyncClient(trust_env=False, timeout=INFO_TIMEOUT_S) as http:
        answer = await http.get(f"{url}/metrics")
    return counted(answer.raise_for_status().text)


def counted(text: str) -> float:
    """The counter in a Prometheus text, over all its labels; 0 before the first one."""
    lines = (line for line in text.splitlines() if line.startswith(TOKENS))
    return sum((float(line.rpartition(" ")[2]) for line in lines), 0.0)


def _middle(rows: Sequence[dict[str, Any]]) -> float:
    return statistics.median(row["tokens_per_s"] for row in rows)


if __name__ == "__main__":
    main()
