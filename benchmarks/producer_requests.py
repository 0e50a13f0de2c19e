"""What a generation request costs the producer in processor time, and how long a collection takes.

    python benchmarks/producer_requests.py [--tokens 10 256] [--tokenizer FOLDER]

The producer of a sequential run samples collections of ``--groups`` x ``--siblings`` responses over
real HTTP, in this process as in its actor. The engine is a scripted server in a child process that
answers at once, so what remains is the producer's own. Prompts repeat (``--prompts``, shuffled):
collections in which an epoch of them ends are told apart from the others.

Microseconds of processor time (all threads) a request, medians: the whole collection; one call of
the engine's client, connection and all; decoding, scoring, and the Parquet file, each by itself;
and what remains: tasks, permits, provenance, metrics, manifest. ``gc_ms`` is the time that full
searches for garbage take, mean of all collections, and ``searches`` how many there were. Nothing is
judged.
"""

import argparse
import asyncio
import gc
import json
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import orjson
import uvloop

from activities.rollout.collection_file import read_samples, write_collection
from activities.rollout.producer import RolloutProducer
from activities.storage.layout import TRAIN_JSONL
from activities.storage.store import Store
from activities.verifiers.registry import build_verifiers
from activities.wire.client import EngineClient
from activities.wire.contract import GenerateRequest, SamplingParams
from configs.run import RunSpec
from models.ids import FenceToken, RunRef
from models.prompt import DataState, PreparedPrompt, PromptMetadata, VerifierTarget
from models.rollout import CollectRequest
from workers.actors.garbage import freeze_living_objects
from workers.actors.producer import decoder

VOCAB_SIZE, EOS = 1000, 2
SKIPPED = 3
"""Collections before those that count."""
START_S = 30.0


def main() -> None:
    """Measure; or be the engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[10, 256], help="of a response")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=78)
    parser.add_argument("--prompt-tokens", type=int, default=30)
    parser.add_argument("--updates", type=int, default=20, help="collections that count")
    parser.add_argument("--tokenizer", type=Path, help="a model's folder; default: fixed text")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.serve is not None:
        asyncio.run(serve(socket.socket(fileno=told.serve), told.tokens[0]))
        return
    load = os.getloadavg()
    rows = [measured(told, tokens) for tokens in told.tokens]
    packages = {name: version(name) for name in ("httpx", "h11", "pydantic", "pyarrow")}
    print(json.dumps({"python": platform.python_version(), **packages, "rows": rows}))
    print(f"load {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after")


def measured(told: argparse.Namespace, tokens: int) -> dict[str, float]:
    """The row of responses of ``tokens`` tokens, with an engine of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        handle = str(listener.fileno())
        command = [sys.executable, __file__, "--serve", handle, "--tokens", str(tokens)]
        engine = subprocess.Popen(command, pass_fds=[listener.fileno()])
    try:
        row = uvloop.run(measure(told, tokens, url))  # the actor's loop
    finally:
        engine.terminate()
        engine.wait(START_S)
    print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    return row


async def measure(told: argparse.Namespace, tokens: int, url: str) -> dict[str, float]:
    """Collections, then each part by itself."""
    root = tempfile.mkdtemp(prefix="perdure-requests-")
    spec, store = run_spec(told, tokens, root), Store(root)
    decode = decoder(told.tokenizer) if told.tokenizer else lambda ids: "It is 12."
    prompts = [prepared(row, told.prompt_tokens) for row in range(told.prompts)]
    producer = make_producer(spec, store, prompts, decode)
    searches = watch_full_searches()
    await producer.set_engines(FenceToken(epoch=1, update=0, attempt=1), (url,))
    for update in range(SKIPPED):
        await collect(producer, spec, update)
    freeze_living_objects()  # as the actor does after its start
    searches.clear()
    counted = [await collect(producer, spec, SKIPPED + each) for each in range(told.updates)]
    gc_seconds, gc_count = sum(searches), len(searches)
    await producer.close()
    per_call = 1e6 / (told.groups * told.siblings)
    ends = [ends_an_epoch(told, SKIPPED + index) for index in range(told.updates)]
    parts = {
        "call": await call_us(url, spec, prompts[0], told.groups * told.siblings),
        **await parts_us(store, prompts[0], decode),
    }
    total = median(cpu for _, cpu in counted) * per_call
    crossing = [wall for (wall, _), end in zip(counted, ends, strict=True) if end]
    within = [wall for (wall, _), end in zip(counted, ends, strict=True) if not end]
    return {
        "tokens": tokens,
        "total_us": total,
        "least_us": min(cpu for _, cpu in counted) * per_call,
        **{f"{name}_us": value for name, value in parts.items()},
        "rest_us": total - sum(parts.values()),
        "collection_s": median(within) if within else float("nan"),
        "epoch_end_s": median(crossing) if crossing else float("nan"),
        "gc_ms": 1e3 * gc_seconds / told.updates,
        "searches": gc_count,
    }


def watch_full_searches() -> list[float]:
    """Seconds of each full search for garbage from now on."""
    seconds: list[float] = []
    began = [0.0]

    def watch(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2 and phase == "start":
            began[0] = time.perf_counter()
        elif info["generation"] == 2:
            seconds.append(time.perf_counter() - began[0])

    gc.callbacks.append(watch)
    return seconds


async def collect(producer: RolloutProducer, spec: RunSpec, update: int) -> tuple[float, float]:
    """Wall and processor seconds of one collection, its commit included."""
    run = RunRef(run_id=spec.run_id, root=spec.output.root, spec_sha256="")
    request = CollectRequest(
        run=run, epoch=1, update=update, policy_version=0, consumed_through=update - 1
    )
    wall, cpu = time.perf_counter(), time.process_time()
    await producer.collect(FenceToken(epoch=1, update=update, attempt=1), request)
    return time.perf_counter() - wall, time.process_time() - cpu


def ends_an_epoch(told: argparse.Namespace, update: int) -> bool:
    """Whether the collection has prompts of two epochs."""
    first, last = update * told.groups, (update + 1) * told.groups - 1
    return bool(first // told.prompts != last // told.prompts)


async def call_us(url: str, spec: RunSpec, prompt: PreparedPrompt, count: int) -> float:
    """Processor microseconds of a call of the engine's client, ``count`` at once."""
    client = EngineClient(url, vocab_size=VOCAB_SIZE, context_length=spec.core.max_context_length)
    request = GenerateRequest(
        rid="0" * 32,
        input_ids=list(prompt.prompt_token_ids),
        sampling_params=SamplingParams(max_new_tokens=spec.inference.max_response_length),
    )
    seconds = []
    for _ in range(SKIPPED + 5):
        began = time.process_time()
        await asyncio.gather(*(client.generate(request, timeout_s=60) for _ in range(count)))
        seconds.append(time.process_time() - began)
    await client.aclose()
    return 1e6 * median(seconds[SKIPPED:]) / count


async def parts_us(
    store: Store, prompt: PreparedPrompt, decode: Callable[[list[int]], str]
) -> dict[str, float]:
    """Processor microseconds a sample of decoding, scoring and writing the last collection."""
    newest = [name for name in store.list("rollouts") if name.endswith(".parquet")][-1]
    groups = read_samples(store, f"rollouts/{newest}")
    samples = [sample for group in groups for sample in group.samples]
    verifiers = build_verifiers()
    found: dict[str, list[float]] = {"decode": [], "verify": [], "write": []}
    for _ in range(5):
        began = time.process_time()
        for sample in samples:
            decode(sample.response_token_ids[:-1])
        decoded = time.process_time()
        for sample in samples:
            await verifiers.score(prompt, sample.text)
        verified = time.process_time()
        write_collection(store, "rollouts/again.parquet", groups)
        ends = (decoded - began, verified - decoded, time.process_time() - verified)
        for name, seconds in zip(found, ends, strict=True):
            found[name].append(1e6 * seconds / len(samples))
    return {name: fmean(sorted(values)[:3]) for name, values in found.items()}


def run_spec(told: argparse.Namespace, tokens: int, root: str) -> RunSpec:
    """A sequential run of responses of exactly ``tokens`` tokens."""
    return RunSpec.model_validate(
        {
            "schema_version": 1,
            "name": "requests",
            "model": {"source": "tiny"},
            "data": {"prompt_data": "train.jsonl"},
            "output": {"root": root},
            "training": {
                "rollout_batch_size": told.groups,
                "samples_per_prompt": told.siblings,
            },
            "core": {
                "filter_zero_std_groups": False,
                "max_context_length": told.prompt_tokens + tokens,
            },
            "inference": {
                "max_response_length": tokens,
                "server_concurrency": told.groups * told.siblings,
            },
        }
    )


def prepared(row: int, length: int) -> PreparedPrompt:
    """A prompt of ``length`` tokens whose answer is a number."""
    ids = tuple(random.Random(row).choices(range(3, VOCAB_SIZE), k=length))
    return PreparedPrompt(
        input=f"prompt {row}",
        label="12",
        prompt_token_ids=ids,
        metadata=PromptMetadata(
            prepared_sample_id=f"task:train:{row}",
            source_dataset="task",
            source_row=row,
            query=f"prompt {row}",
            verifiers=(VerifierTarget(name="number", target="12"),),
            run_prompt_tokens=length,
            run_prompt_token_ids_sha256="",
        ),
    )


def make_producer(
    spec: RunSpec,
    store: Store,
    prompts: list[PreparedPrompt],
    decode: Callable[[list[int]], str],
) -> RolloutProducer:
    """As its actor makes it."""
    store.write_bytes(TRAIN_JSONL, b"the training file\n")
    return RolloutProducer(
        spec=spec,
        store=store,
        run=RunRef(run_id=spec.run_id, root=store.root, spec_sha256=""),
        train=prompts,
        held_out=[],
        verifiers=build_verifiers(),
        decode=decode,
        state=DataState(),
        eos_token_ids=(EOS,),
        vocab_size=VOCAB_SIZE,
    )


async def serve(listener: socket.socket, tokens: int) -> None:
    """The engine: every request is answered at once with the same ``tokens`` tokens."""
    ids = [*(7 * each % 500 + 10 for each in range(tokens - 1)), EOS]
    logprobs = [[-0.1234567 - each / 1000, token_id, None] for each, token_id in enumerate(ids)]

    def answer(request: dict[str, Any]) -> bytes:
        meta = {
            "id": request["rid"],
            "finish_reason": {"type": "stop", "matched": EOS},
            "prompt_tokens": len(request["input_ids"]),
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "weight_version": "0",
            "output_token_logprobs": logprobs,
        }
        body = orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        return head % len(body) + body

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                writer.write(answer(orjson.loads(await reader.readexactly(length))))
        writer.close()

    server = await asyncio.start_server(talk, sock=listener)
    await server.serve_forever()


if __name__ == "__main__":
    main()
