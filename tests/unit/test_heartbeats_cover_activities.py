"""No part of an activity goes without heartbeats: slow answers and disks are no dead workers."""

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from activities import reporting
from activities.background.snapshot import snapshot
from activities.checkpoint import checkpoint
from activities.collect import collect
from activities.evaluate import evaluate
from activities.export import export
from activities.optimize import optimize
from activities.prepare import prepare
from activities.storage.store import Store
from activities.tokens import token_of
from models.background import SnapshotRequest
from models.checkpoint import CheckpointRequest
from models.errors import ServiceUnreachable
from models.evaluation import EvaluateRequest, ExportRequest
from models.ports import ServingReport
from models.rollout import CollectionCounts, CollectRequest, RolloutCollection
from models.run import PrepareRequest
from models.update import OptimizeRequest
from tests.support.fake_fleet import FakeFleet
from tests.support.publication_bench import (
    PublicationBench,
    async_document,
    publication_bench,
)

HEARTBEAT_TIMEOUT_S = 0.8
SLOW_S = 1.0
"""What a slow answer or a slow append takes here."""
COLLECTION = RolloutCollection(
    update=0, epoch=1, uri="rollouts/0000000.e1.parquet", sha256="0" * 64,
    counts=CollectionCounts(groups=2, samples=4, prompt_tokens=8, response_tokens=40),
    reward_mean=0.1, min_version=0, max_version=0, seconds=0.5,
)  # fmt: skip

Act = Callable[[PublicationBench], Awaitable[Any]]


@pytest.fixture
async def bench(tmp_path: Path) -> PublicationBench:
    made = await publication_bench(FakeFleet(2, with_router=True), async_document(tmp_path))
    await made.publish(0)
    limit = timedelta(seconds=HEARTBEAT_TIMEOUT_S)
    made.activity.info = dataclasses.replace(made.activity.info, heartbeat_timeout=limit)
    return made


async def collects(bench: PublicationBench) -> None:
    request = CollectRequest(
        run=bench.run, epoch=1, update=0, policy_version=0, consumed_through=-1
    )
    await bench.activity.run(collect, bench.site, request, token_of(request, 1))


async def optimizes(bench: PublicationBench) -> None:
    request = OptimizeRequest(run=bench.run, epoch=1, update=0, collection=COLLECTION)
    await bench.activity.run(optimize, bench.site, request, token_of(request, 1))


async def checkpoints(bench: PublicationBench) -> None:
    await optimizes(bench)
    request = CheckpointRequest(run=bench.run, epoch=1, update=0, policy_version=1)
    await bench.activity.run(checkpoint, bench.site, request, token_of(request, 1))


async def evaluates(bench: PublicationBench) -> None:
    request = EvaluateRequest(run=bench.run, epoch=1, update=0, policy_version=0, phase="initial")
    await bench.activity.run(evaluate, bench.site, request, token_of(request, 1))


async def publishes(bench: PublicationBench) -> None:
    await bench.publish(1)


async def prepares(bench: PublicationBench) -> None:
    request = PrepareRequest(run=bench.run, epoch=2)
    await bench.activity.run(prepare, bench.site, request, token_of(request, 1))


async def exports(bench: PublicationBench) -> None:
    request = ExportRequest(run=bench.run, epoch=1, update=0, policy_version=0)
    await bench.activity.run(export, bench.site, request, token_of(request, 1))


async def snapshots(bench: PublicationBench) -> None:
    request = SnapshotRequest(run=bench.run, epoch=1, update=0, policy_version=0)
    await bench.activity.run(snapshot, bench.site, request, token_of(request, 1))


async def longest_silence_s(bench: PublicationBench, act: Act) -> float:
    """The longest time of the activity without a heartbeat, its end included."""
    beats = [time.monotonic()]
    bench.activity.on_heartbeat = lambda *_: beats.append(time.monotonic())
    await act(bench)
    beats.append(time.monotonic())
    return max(after - before for before, after in itertools.pairwise(beats))


@pytest.mark.parametrize("act", [collects, optimizes, checkpoints, evaluates])
async def test_a_producer_that_does_not_answer_at_the_end(
    bench: PublicationBench, act: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last question for serving reports may take longer than a heartbeat time-out."""

    async def slow(after: int) -> tuple[ServingReport, ...]:
        await asyncio.sleep(SLOW_S)
        raise ServiceUnreachable("the producer is busy")

    monkeypatch.setattr(bench.fleet.live_producer, "reports", slow)
    assert reporting.ASK_TIMEOUT_S > SLOW_S
    assert await longest_silence_s(bench, act) < HEARTBEAT_TIMEOUT_S


@pytest.mark.parametrize(
    "act",
    [collects, optimizes, checkpoints, evaluates, publishes, prepares, exports, snapshots],
)
async def test_storage_that_is_slow_to_append(
    bench: PublicationBench, act: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Store.append_jsonl

    def slowly(self: Store, rel: str, row: dict[str, Any]) -> None:
        time.sleep(SLOW_S)  # in a thread, like a distant object store
        append(self, rel, row)

    monkeypatch.setattr(Store, "append_jsonl", slowly)
    assert await longest_silence_s(bench, act) < HEARTBEAT_TIMEOUT_S
