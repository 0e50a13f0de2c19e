"""What a publication by handles costs besides the copy: many tensors of few numbers.

    python benchmarks/publication_overhead.py
    python benchmarks/publication_overhead.py --layers 24 --rounds 100

A real SGLang engine on a CPU and a trainer's sender in this process, as update and load phases of a
publication drive them. Tensors are so small that copying them takes no time: what remains is the
cost of every call and every tensor. Told: milliseconds a publication, by part, median and least,
and how many operations torch is asked for by the trainer's side, each of them a launch or two on a
GPU. Nothing is judged: all of it is in ``WORK/publication_overhead.json``.
"""

import argparse
import asyncio
import statistics
from collections import defaultdict
from collections.abc import Sequence
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

TOKEN = FenceToken(epoch=1, update=0, attempt=1)
UPDATE_TIMEOUT_S = 120.0
CONTEXT = 256


class Trainer:
    """The trainer's port, with the sender at hand; other calls than these never come."""

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender

    async def offer_weights(self, token: FenceToken, version: int) -> WeightsRef:
        """Describe the weights."""
        return await asyncio.to_thread(self._sender.offer, version)

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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=50, help="publications, after five others")
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
        model={"source": told.model, "tiny": tiny},
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
        taken: defaultdict[str, list[float]] = defaultdict(list)
        for version in range(1, told.rounds + 6):
            for weight in model.parameters():
                weight.data.view(-1)[0] += 1
            trace = await publish(site, trainer, run, engine, version)
            if version > 5:
                for part, seconds in {**trace.seconds, "total": trace.total_seconds}.items():
                    taken[part].append(1000 * seconds)
    return {
        "about": about,
        "tensors": len(dict(model.named_parameters())),
        "milliseconds": {part: middle_and_least(each) for part, each in taken.items()},
        "operations": count(sender),
    }


async def publish(
    site: Site, trainer: Trainer, run: RunRef, engine: EngineHandle, version: int
) -> PublicationTrace:
    """One publication, all of it but the parts of the run's own actors."""
    trace = PublicationTrace(version)
    with trace.part("export"):
        weights = await trainer.offer_weights(TOKEN, version)
    order = LoadOrder(run, TOKEN, weights, UPDATE_TIMEOUT_S)
    updated = await update_fleet(site, order, (engine,), trace)
    if updated.repeated or updated.replaced:
        raise RuntimeError(f"version {version} was not loaded: {updated}")
    return trace


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
