"""Resident memory of a fully async producer after 200 and after 2,000 prompt groups.

    python benchmarks/producer_memory.py [--groups 2000] [--work FOLDER]

The producer runs in this process as in its actor: it samples freely over real HTTP, scores,
filters, queues, commits collections, and weights are published every update. The engine is a
scripted server in a child process that answers at once, so that nothing but the producer's own
memory can grow. Prompts repeat (epochs), now and then a call fails for a serving reason, and a
share of the groups ties and is filtered.

Nothing is judged: a line every 200 groups and the growth are printed.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvicorn

from activities.rollout.producer import RolloutProducer
from activities.storage.layout import TRAIN_JSONL
from activities.storage.store import Store
from activities.verifiers.registry import build_verifiers
from configs.run import RunSpec
from models.ids import FenceToken, RunRef
from models.prompt import DataState, PreparedPrompt, PromptMetadata, VerifierTarget
from models.rollout import CollectRequest
from workers.actors.allocator import return_freed_memory

NUM_PROMPTS = 300
VOCAB_SIZE, EOS = 128, 2
RESPONSE_TOKENS = 64
FAULT_EVERY = 997
"""One call in so many is answered 503."""
EVERY = 200
"""Groups between two lines."""
KEEP_ALIVE_S = 60
"""Longer than a client reuses a connection, as with every engine."""
START_DEADLINE_S = 60.0
COLLECT_DEADLINE_S = 300.0


def main() -> None:
    """Measure; or be the engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--work", type=Path, help="output root; default: a new folder")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        uvicorn.run(
            scripted_engine,
            fd=arguments.serve,
            log_level="error",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        return
    work = arguments.work or Path(tempfile.mkdtemp(prefix="perdure-memory-"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, __file__, "--serve", str(listener.fileno())]
        engine = subprocess.Popen(command, pass_fds=[listener.fileno()])
        try:
            rows = asyncio.run(measure(work, url, arguments.groups))
        finally:
            engine.terminate()
            engine.wait(START_DEADLINE_S)
    first, last = rows[0]["resident_mib"], rows[-1]["resident_mib"]
    result = {
        "python": platform.python_version(),
        **{name: version(name) for name in ("httpx", "pyarrow", "pydantic")},
        "load_average": os.getloadavg(),
        "rows": rows,
        "growth": last / first - 1,
    }
    print(json.dumps(result))
    print(
        f"{first:.1f} MiB after {rows[0]['groups']} groups, {last:.1f} MiB after "
        f"{rows[-1]['groups']}: {100 * result['growth']:+.1f} %"
    )


async def measure(work: Path, url: str, num_groups: int) -> list[dict[str, float]]:
    """Collect and publish until ``num_groups`` groups are committed; a row every ``EVERY``."""
    return_freed_memory()  # as the actor does
    spec = run_spec(work)
    run = RunRef(run_id=spec.run_id, root=str(work), spec_sha256="")
    producer = make_producer(spec, run)
    started = time.monotonic()
    rows: list[dict[str, float]] = []
    per_update = spec.training.rollout_batch_size
    async with httpx.AsyncClient(base_url=url, timeout=START_DEADLINE_S) as engine:
        await until_up(engine)
        await producer.set_engines(token(0, 0), (url,))
        for update in range(-(-num_groups // per_update)):
            await publish(producer, engine, update)
            request = CollectRequest(
                run=run, epoch=1, update=update, policy_version=update, consumed_through=update - 1
            )
            async with asyncio.timeout(COLLECT_DEADLINE_S):
                await producer.collect(token(update, 1), request)
            done = (update + 1) * per_update
            if done // EVERY > (done - per_update) // EVERY:
                rows.append({"groups": done, "resident_mib": resident_mib()})
                print(f"{done:>6} groups  {rows[-1]['resident_mib']:.1f} MiB  "
                      f"{done / (time.monotonic() - started):.0f} groups/s")  # fmt: skip
    await producer.close()
    return rows


async def publish(producer: RolloutProducer, engine: httpx.AsyncClient, update: int) -> None:
    """Policy version ``update`` goes live between the boundary's two ends."""
    await producer.begin_publication(token(update, 0), update)
    (await engine.post("/version", json=update)).raise_for_status()
    await producer.end_publication(token(update, 0), update)


def token(update: int, attempt: int) -> FenceToken:
    """Tokens grow with the update."""
    return FenceToken(epoch=1, update=update, attempt=attempt)


def resident_mib() -> float:
    """Resident memory of this process without garbage that waits for its collection."""
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 2**20


async def until_up(engine: httpx.AsyncClient) -> None:
    """Wait for the child process to accept connections."""
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            (await engine.get("/health")).raise_for_status()
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
        else:
            return


def run_spec(work: Path) -> RunSpec:
    """A fully async refresh run of eight groups of eight samples an update."""
    return RunSpec.model_validate(
        {
            "schema_version": 1,
            "name": "memory",
            "model": {"source": "tiny"},
            "data": {"prompt_data": "train.jsonl"},
            "output": {"root": str(work)},
            "training": {"rollout_batch_size": 8, "samples_per_prompt": 8},
            "core": {
                "publication_mode": "refresh",
                "max_policy_lag": 4,
                "max_context_length": 128,
                "pipeline_observation_interval_s": 5.0,
            },
            "async": {"fully_async": True, "async_max_concurrent_samples": 128},
            "inference": {"max_response_length": RESPONSE_TOKENS},
        }
    )


def make_producer(spec: RunSpec, run: RunRef) -> RolloutProducer:
    """As the actor makes it, on prompts of this script."""
    store = Store(run.root)
    store.write_bytes(TRAIN_JSONL, b"the training file\n")
    prompts = [
        PreparedPrompt(
            input=f"prompt {row}",
            label="7",
            prompt_token_ids=tuple(random.Random(row).choices(range(3, VOCAB_SIZE), k=32)),
            metadata=PromptMetadata(
                prepared_sample_id=f"task:train:{row}",
                source_dataset="task",
                source_row=row,
                query=f"prompt {row}",
                verifiers=(VerifierTarget(name="number", target="7"),),
                run_prompt_tokens=32,
                run_prompt_token_ids_sha256="",
            ),
        )
        for row in range(NUM_PROMPTS)
    ]
    return RolloutProducer(
        spec=spec,
        store=store,
        run=run,
        train=prompts,
        held_out=[],
        verifiers=build_verifiers(),
        decode=lambda ids: "".join(chr(token_id) for token_id in ids),
        state=DataState(),
        eos_token_ids=(EOS,),
        vocab_size=VOCAB_SIZE,
    )


class ScriptedEngine:
    """An ASGI application with the part of the engine contract that a producer calls."""

    def __init__(self) -> None:
        self._version = 0
        self._calls = 0
        self._random = random.Random(17)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one call."""
        if scope["type"] != "http":
            return
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        status, answer = self._answer(scope["path"], body)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def _answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/version":
            self._version = json.loads(body)
        if path != "/generate":
            return 200, {}
        self._calls += 1
        if self._calls % FAULT_EVERY == 0:
            return 503, {"object": "error", "message": "The request queue is full.", "code": 503}
        return 200, self._response(json.loads(body))

    def _response(self, request: dict[str, Any]) -> dict[str, Any]:
        """Random characters; a tenth of the responses ends with the right number."""
        length = self._random.randrange(8, RESPONSE_TOKENS)
        ids = self._random.choices(range(ord("a"), ord("z") + 1), k=length)
        ids += [ord("7") if self._random.random() < 0.1 else ord("3"), EOS]
        ids = ids[-request["sampling_params"]["max_new_tokens"] :]
        return {
            "text": "",
            "output_ids": ids,
            "meta_info": {
                "id": request["rid"],
                "finish_reason": {"type": "stop", "matched": EOS},
                "prompt_tokens": len(request["input_ids"]),
                "completion_tokens": len(ids),
                "weight_version": str(self._version),
                "output_token_logprobs": [[-self._random.random(), i, None] for i in ids],
            },
        }


scripted_engine = ScriptedEngine()


if __name__ == "__main__":
    main()
