"""Colocated engines give their memory back for an update and take it again in the publication."""

import asyncio
import dataclasses
from collections.abc import Awaitable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.optimize import optimize
from activities.publish import publish
from activities.storage import layout
from activities.storage.store import Store
from activities.tokens import token_of
from configs.load import resolve_document
from models.errors import ServiceUnreachable, TrainerLost
from models.ids import FenceToken, RunRef
from models.publication import PublicationReport, PublishRequest
from models.rollout import CollectRequest
from models.run import PrepareRequest
from models.update import OptimizeRequest
from tests.support.fake_engines import checksums_of
from tests.support.fake_fleet import FakeFleet, site_of

TOKEN = FenceToken(epoch=1, update=0, attempt=1)
MEMORY = ("release", "wake", "load", "optimize")


class Bench:
    """A prepared fake fleet of two engines and the activities on it."""

    def __init__(self, root: Path, mode: str, update_timeout_s: float = 30.0) -> None:
        document = {
            "schema_version": 1,
            "name": "x",
            "model": {"source": "tiny", "tiny": {}},
            "data": {"tasks": [{"task": "reverse_word", "train_count": 64}]},
            "output": {"root": str(root)},
            "placement": {"mode": mode},
            "inference": {"update_timeout_s": update_timeout_s},
        }
        loaded = resolve_document(document, origin="test")
        self.store = Store(root)
        self.store.write_json(layout.RESOLVED_CONFIG, loaded.document)
        self.run = RunRef(run_id="train/x", root=str(root), spec_sha256=loaded.sha256)
        self.fleet = FakeFleet(num_engines=2)
        self.activity = ActivityEnvironment()
        self.activity.info = dataclasses.replace(
            self.activity.info, heartbeat_timeout=timedelta(seconds=1)
        )

    async def publish(self, version: int, epoch: int = 1) -> PublicationReport:
        request = PublishRequest(run=self.run, epoch=epoch, update=version, version=version)
        report: PublicationReport = await self._run(publish, request, 1)
        return report

    async def optimize(self, update: int, attempt: int = 1) -> None:
        collected = CollectRequest(
            run=self.run,
            epoch=1,
            update=update,
            policy_version=update,
            consumed_through=update - 1,
        )
        producer = self.fleet.live_producer
        collection = await producer.collect(token_of(collected, attempt), collected)
        request = OptimizeRequest(run=self.run, epoch=1, update=update, collection=collection)
        await self._run(optimize, request, attempt)

    def _run(self, activity: Any, request: Any, attempt: int) -> Awaitable[Any]:
        token = token_of(request, attempt)
        return self.activity.run(activity, site_of(self.fleet), request, token)

    def moves(self) -> list[str]:
        """Logged calls that move memory, weights or the policy."""
        return [call for call in self.fleet.log if call.startswith(MEMORY)]

    def rows(self, name: str, **values: Any) -> list[dict[str, Any]]:
        found = self.store.read_jsonl(name).rows
        return [row for row in found if values.items() <= row.items()]


async def colocated(root: Path, **options: float) -> Bench:
    bench = Bench(root, "colocated", **options)
    await bench.fleet.prepare(TOKEN, PrepareRequest(run=bench.run, epoch=1))
    await bench.publish(0)
    bench.fleet.log.clear()
    return bench


async def test_memory_goes_to_the_trainer_and_comes_back_before_the_load(tmp_path: Path) -> None:
    bench = await colocated(tmp_path)
    await bench.optimize(0)
    assert sorted(bench.moves()[:2]) == ["release engine-0", "release engine-1"]
    assert bench.moves()[2:] == ["optimize 0"]
    assert all(engine.paused for engine in bench.fleet.engine_list)
    (released,) = bench.rows(layout.DRIVER_TIMING, stage="engine_release")
    assert (released["rollout_id"], released["passed"]) == (0, True)
    (trained,) = bench.rows(layout.DRIVER_TIMING, stage="training")
    assert released["started_unix"] <= trained["started_unix"]

    report = await bench.publish(1)
    assert sorted(bench.moves()[3:5]) == ["wake engine-0", "wake engine-1"]
    assert sorted(bench.moves()[5:]) == ["load engine-0 1", "load engine-1 1"]
    for engine in bench.fleet.engine_list:
        assert (engine.paused, engine.mark, engine.version) == (False, "", 1)
        assert engine.loaded == checksums_of(1)
    (row,) = bench.rows(layout.PUBLICATION, version=1)
    assert 0 < row["memory_seconds"] <= row["total_seconds"]
    assert not report.repeated_version


async def test_an_update_that_is_asked_for_again_releases_nothing_twice(tmp_path: Path) -> None:
    bench = await colocated(tmp_path)
    bench.fleet.script.fail("optimize 0", ServiceUnreachable("the answer is lost"))
    with pytest.raises(ServiceUnreachable):
        await bench.optimize(0)
    await bench.optimize(0, attempt=2)
    assert [call for call in bench.moves() if call.startswith("release")] == bench.moves()[:2]
    assert len(bench.rows(layout.DRIVER_TIMING, stage="engine_release", passed=True)) == 2


async def test_the_version_before_is_loaded_again_after_a_lost_update(tmp_path: Path) -> None:
    """The engines still name it as theirs by number, and hold nothing."""
    bench = await colocated(tmp_path)
    bench.fleet.script.fail("optimize 0", TrainerLost("killed"))
    with pytest.raises(TrainerLost):
        await bench.optimize(0)
    await bench.fleet.prepare(
        FenceToken(epoch=2, update=0, attempt=1), PrepareRequest(run=bench.run, epoch=2)
    )
    report = await bench.publish(0, epoch=2)
    assert not report.repeated_version
    assert sorted(bench.moves()[-2:]) == ["load engine-0 0", "load engine-1 0"]
    assert all(engine.loaded == checksums_of(0) for engine in bench.fleet.engine_list)


@pytest.mark.parametrize("refuses", [True, False], ids=["refuses", "hangs"])
async def test_an_engine_that_keeps_its_memory_is_ended_before_the_step(
    tmp_path: Path, refuses: bool
) -> None:
    bench = await colocated(tmp_path, update_timeout_s=30.0 if refuses else 0.2)
    if refuses:
        bench.fleet.script.fail("release engine-1", ServiceUnreachable("no answer"))
    else:
        bench.fleet.script.hold("release engine-1")
    stubborn = bench.fleet.engine_list[1]
    await asyncio.wait_for(bench.optimize(0), 10)
    assert not stubborn.alive
    assert "optimize 0" in bench.moves()
    assert "respawned engine-1" not in bench.fleet.log
    await bench.publish(1)
    assert "respawned engine-1" in bench.fleet.log
    assert [engine.version for engine in bench.fleet.engine_list] == [1, 1]
    # The replacement never gave anything back.
    assert [call for call in bench.moves() if call.startswith("wake")] == ["wake engine-0"]


async def test_an_engine_that_dies_under_the_step_comes_back_with_the_publication(
    tmp_path: Path,
) -> None:
    bench = await colocated(tmp_path)
    gate = bench.fleet.script.hold("optimize 0")
    training = asyncio.create_task(bench.optimize(0))
    await bench.fleet.script.reached("optimize 0")
    bench.fleet.kill_engine(0)
    gate.set()
    await asyncio.wait_for(training, 10)
    assert "respawned engine-0" not in bench.fleet.log
    report = await bench.publish(1)
    assert len(report.engines) == 2
    assert all(engine.loaded == checksums_of(1) for engine in bench.fleet.engine_list)


@pytest.mark.parametrize("phase", ["wake", "unknown", "dead"])
async def test_an_engine_that_does_not_wake_is_replaced(tmp_path: Path, phase: str) -> None:
    bench = await colocated(tmp_path)
    await bench.optimize(0)
    engine = bench.fleet.engine_list[0]
    if phase == "wake":
        bench.fleet.script.fail("wake engine-0", ServiceUnreachable("no answer"))
    elif phase == "unknown":
        engine.mark = "moving:weights"
    else:
        bench.fleet.kill_engine(0)
    report = await bench.publish(1)
    assert not engine.alive
    assert [each.phase for each in report.replaced] == ([] if phase == "dead" else ["wake"])
    assert [each.version for each in report.engines] == [1, 1]
    assert not any(each.paused or each.mark for each in bench.fleet.engine_list)


async def test_engines_of_their_own_keep_their_memory(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "cpu")
    await bench.fleet.prepare(TOKEN, PrepareRequest(run=bench.run, epoch=1))
    await bench.publish(0)
    await bench.optimize(0)
    await bench.publish(1)
    assert not [call for call in bench.moves() if call.startswith(("release", "wake"))]
    assert bench.rows(layout.DRIVER_TIMING, stage="engine_release") == []
