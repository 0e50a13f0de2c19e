"""Publication and healing against fake engines: what is loaded, verified, refused, replaced."""

import asyncio
import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.collect import collect
from activities.healing import with_healing
from activities.loading import LoadOrder, load_engine
from activities.publish import publish
from activities.site import Site, spec_of
from activities.storage import layout
from activities.storage.store import Store
from activities.tokens import token_of
from activities.wire.digest import weights_digest
from configs.load import resolve_document
from configs.run import RunSpec
from models.errors import (
    ContractViolation,
    DigestMismatch,
    EngineLost,
    ProducerLost,
    ServiceUnreachable,
)
from models.ids import FenceToken, RunRef
from models.publication import PublishRequest, WeightsRef
from models.rollout import CollectRequest
from models.run import PrepareRequest
from tests.support.fake_engines import checksums_of
from tests.support.fake_fleet import FakeFleet, site_of

TOKEN = FenceToken(epoch=1, update=0, attempt=1)


def weights_of(version: int) -> WeightsRef:
    return WeightsRef(
        version=version, path=f"mem/{version}", digest=weights_digest(checksums_of(version)),
        num_tensors=1, num_bytes=8, dtype="float32",
    )  # fmt: skip


@dataclasses.dataclass
class Bench:
    """A prepared fake fleet on a real root, and an activity environment."""

    fleet: FakeFleet
    run: RunRef
    activity: ActivityEnvironment

    @property
    def site(self) -> Site:
        return site_of(self.fleet)

    @property
    def spec(self) -> RunSpec:
        return spec_of(self.run)

    def publication(self, version: int) -> PublishRequest:
        return PublishRequest(run=self.run, epoch=1, update=version, version=version)

    async def publish(self, version: int, attempt: int = 1) -> Any:
        request = self.publication(version)
        return await self.activity.run(publish, self.site, request, token_of(request, attempt))


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    document = {
        "schema_version": 1,
        "name": "x",
        "model": {"source": "tiny", "tiny": {}},
        "data": {"tasks": [{"task": "reverse_word", "train_count": 64}]},
        "output": {"root": str(tmp_path)},
    }
    loaded = resolve_document(document, origin="test")
    Store(tmp_path).write_json(layout.RESOLVED_CONFIG, loaded.document)
    run = RunRef(run_id="train/x", root=str(tmp_path), spec_sha256=loaded.sha256)
    fleet = FakeFleet(num_engines=2)
    await fleet.prepare(TOKEN, PrepareRequest(run=run, epoch=1))
    activity = ActivityEnvironment()
    activity.info = dataclasses.replace(activity.info, heartbeat_timeout=timedelta(seconds=1))
    return Bench(fleet, run, activity)


async def test_a_publication_confirms_every_engine(bench: Bench) -> None:
    report = await bench.publish(0)
    assert [(each.engine, each.version) for each in report.engines] == [
        ("engine-0", 0),
        ("engine-1", 0),
    ]
    assert {each.digest for each in report.engines} == {weights_digest(checksums_of(0))}
    assert not report.repeated_version
    assert not any(engine.paused for engine in bench.fleet.engine_list)
    assert bench.fleet.live_producer.urls == ("http://engine-0.0", "http://engine-1.0")
    (row,) = Store(bench.run.root).read_jsonl(layout.PUBLICATION).rows
    assert row["version"] == 0
    assert row["total_seconds"] >= row["load_seconds"]


async def test_publishing_what_is_live_moves_nothing(bench: Bench) -> None:
    await bench.publish(0)
    loads = [call for call in bench.fleet.log if call.startswith("load")]
    report = await bench.publish(0, attempt=2)
    assert report.repeated_version
    assert [call for call in bench.fleet.log if call.startswith("load")] == loads


async def test_an_engine_left_paused_by_a_dead_worker_is_opened_again(bench: Bench) -> None:
    await bench.publish(0)
    bench.fleet.engine_list[1].paused = True
    await bench.publish(0, attempt=2)
    assert not bench.fleet.engine_list[1].paused


async def test_the_same_version_with_other_bytes_is_loaded_again(bench: Bench) -> None:
    await bench.publish(0)
    bench.fleet.engine_list[0].loaded = {"model.weight": "dead"}
    report = await bench.publish(0, attempt=2)
    assert not report.repeated_version
    assert bench.fleet.engine_list[0].loaded == checksums_of(0)


async def test_a_dead_engine_is_replaced_before_the_load(bench: Bench) -> None:
    await bench.publish(0)
    bench.fleet.kill_engine(0)
    await bench.publish(0, attempt=2)
    assert bench.fleet.live_producer.urls == ("http://engine-0.1", "http://engine-1.0")


async def test_an_engine_that_dies_under_the_load_gets_a_replacement(bench: Bench) -> None:
    gate = bench.fleet.script.hold("load engine-1 0")
    publishing = asyncio.create_task(bench.publish(0))
    await bench.fleet.script.reached("load engine-1 0")
    bench.fleet.kill_engine(1)
    gate.set()
    report = await asyncio.wait_for(publishing, 10)
    assert "respawned engine-1" in bench.fleet.log
    assert len(report.engines) == 2
    assert bench.fleet.live_producer.urls == ("http://engine-0.0", "http://engine-1.1")


async def test_an_engine_that_never_answers_is_lost(bench: Bench) -> None:
    bench.fleet.script.fail(
        "load engine-0 0", ServiceUnreachable("silence"), ServiceUnreachable("silence")
    )
    with pytest.raises(EngineLost, match="silence"):
        await bench.publish(0)


async def test_wrong_bytes_are_never_opened_and_cost_the_engine(bench: Bench) -> None:
    wrong = bench.fleet.engine_list[0]
    wrong.corrupt_loads = 1
    report = await bench.publish(0)
    assert wrong.paused
    assert not wrong.alive
    assert bench.fleet.live_producer.urls == ("http://engine-0.1", "http://engine-1.0")
    (failure,) = report.replaced
    assert (failure.engine, failure.incarnation, failure.phase) == ("engine-0", 0, "verify")
    assert "have digest" in failure.error


async def test_wrong_bytes_of_the_replacement_too_are_a_digest_mismatch(bench: Bench) -> None:
    bench.fleet.engine_list[0].corrupt_loads = 1
    ensure = bench.fleet.ensure_engines

    async def ensure_and_corrupt(token: FenceToken, run: RunRef) -> Any:
        engines = await ensure(token, run)
        bench.fleet.engine_list[0].corrupt_loads = 1
        return engines

    bench.fleet.ensure_engines = ensure_and_corrupt  # type: ignore[method-assign]
    with pytest.raises(DigestMismatch, match="engine-0"):
        await bench.publish(0)
    assert bench.fleet.engine_list[0].paused
    assert bench.fleet.live_producer.urls == ()


async def test_a_wrong_version_after_the_load_is_refused(bench: Bench) -> None:
    engine = bench.fleet.engine_list[0]
    client = bench.fleet.client(engine.url)

    async def load_nothing(path: str, version: int, timeout_s: float) -> None:
        return None

    client.update_weights_from_disk = load_nothing  # type: ignore[method-assign]
    site = dataclasses.replace(bench.site, engine=lambda url: client)
    with pytest.raises(ContractViolation, match="serves version None after loading version 3"):
        await load_engine(site, LoadOrder(bench.run, TOKEN, weights_of(3), 5.0), engine.handle)


async def test_engines_dead_before_a_collection_are_replaced_first(bench: Bench) -> None:
    await bench.publish(0)
    bench.fleet.kill_engine(1)
    request = CollectRequest(
        run=bench.run, epoch=1, update=0, policy_version=0, consumed_through=-1
    )
    await bench.activity.run(collect, bench.site, request, token_of(request, 1))
    log = bench.fleet.log
    assert log.index("respawned engine-1") < log.index("collect 0")
    assert bench.fleet.engine_list[1].version == 0
    (row,) = [
        row
        for row in Store(bench.run.root).read_jsonl(layout.DRIVER_TIMING).rows
        if row["stage"] == "generation_wait"
    ]
    assert row["passed"]
    assert row["rollout_id"] == 0


async def test_a_failing_replacement_ends_the_call_it_was_for(bench: Bench) -> None:
    await bench.publish(0)
    cancelled = asyncio.Event()
    began = asyncio.Event()

    async def call() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    working = asyncio.create_task(
        with_healing(bench.site, bench.run, token_of(bench.publication(0), 2), bench.spec, call)
    )
    await asyncio.wait_for(began.wait(), 5)
    for _ in range(2):
        bench.fleet.script.fail("load engine-0 0", ServiceUnreachable("no memory"))
    bench.fleet.kill_engine(0)
    with pytest.raises(EngineLost, match="no memory"):
        await asyncio.wait_for(working, 5)
    assert cancelled.is_set()


async def test_the_error_of_the_call_wins_over_watching(bench: Bench) -> None:
    await bench.publish(0)

    async def call() -> None:
        raise ProducerLost("gone")

    token = token_of(bench.publication(0), 2)
    with pytest.raises(ProducerLost):
        await with_healing(bench.site, bench.run, token, bench.spec, call)
    assert bench.fleet.deaths == []
