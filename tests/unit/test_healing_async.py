"""Engines and router of a fully async run are kept alive, also while only the trainer works."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from activities import healing
from activities.checkpoint import checkpoint
from activities.collect import collect
from activities.healing import beside_healing, heal, with_healing
from activities.optimize import optimize
from activities.storage import layout
from activities.tokens import token_of
from models.checkpoint import CheckpointRequest
from models.errors import EngineLost, ServiceUnreachable, TrainerLost
from models.ids import FenceToken, RunRef
from models.ports import EngineHandle, ServingReport
from models.rollout import CollectionCounts, CollectRequest, RolloutCollection
from models.routing import EngineState
from models.update import OptimizeRequest
from tests.support.fake_fleet import FakeFleet
from tests.support.publication_bench import (
    PublicationBench,
    async_document,
    publication_bench,
)

DEADLINE_S = 10.0
COLLECTION = RolloutCollection(
    update=0, epoch=1, uri="rollouts/0000000.e1.parquet", sha256="0" * 64,
    counts=CollectionCounts(groups=2, samples=4, prompt_tokens=8, response_tokens=40),
    reward_mean=0.1, min_version=0, max_version=0, seconds=0.5,
)  # fmt: skip


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PublicationBench]:
    monkeypatch.setattr(healing, "LOOK_EVERY_S", 0.02)
    made = await publication_bench(
        FakeFleet(2, with_router=True), async_document(tmp_path, update_timeout_s=5.0)
    )
    await made.publish(0)
    yield made
    assert made.fleet.deaths == [], "somebody still listens"


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


def healed(bench: PublicationBench, rank: int, incarnation: int) -> bool:
    """Whether the router routes to that life of the engine, with the published weights."""
    router = bench.fleet.live_router
    rows = {row.name: row for row in router.table.engines}
    name = f"engine-{rank}"
    return (
        name in router.routable()
        and rows[name].incarnation == incarnation
        and bench.fleet.engine_list[rank].version == 0
    )


async def test_a_heal_that_finds_everything_alive_changes_nothing(bench: PublicationBench) -> None:
    tables = len(bench.fleet.live_router.tables)
    await heal(bench.site, bench.run, bench.token(0, 2), 5.0)
    assert len(bench.fleet.live_router.tables) == tables


async def test_a_new_engine_is_routed_to_once_it_is_verified(bench: PublicationBench) -> None:
    bench.fleet.kill_engine(1)
    await heal(bench.site, bench.run, bench.token(0, 2), 5.0)
    assert healed(bench, 1, incarnation=1)
    assert bench.fleet.live_router.table.engines[1].url == "http://engine-1.1"
    assert bench.fleet.live_producer.urls == ("http://router.0",)
    assert bench.fleet.live_producer.healed


async def test_a_new_router_gets_the_table_and_the_producer_its_address(
    bench: PublicationBench,
) -> None:
    before = bench.fleet.live_router.table
    bench.fleet.kill_router()
    loads = [call for call in bench.log if call.startswith("load")]
    await heal(bench.site, bench.run, bench.token(0, 2), 5.0)
    assert bench.fleet.live_router.url == "http://router.1"
    assert bench.fleet.live_router.table == before
    assert bench.fleet.live_producer.urls == ("http://router.1",)
    assert [call for call in bench.log if call.startswith("load")] == loads


async def test_a_router_that_hangs_is_replaced(bench: PublicationBench) -> None:
    before = bench.fleet.live_router.table
    bench.fleet.live_router.deaf = True
    await heal(bench.site, bench.run, bench.token(0, 2), 5.0)
    assert "replace router" in bench.log
    assert bench.fleet.live_router.table == before
    assert bench.fleet.live_producer.urls == ("http://router.1",)
    assert [engine.incarnation for engine in bench.fleet.engine_list] == [0, 0]


async def test_a_router_that_hangs_under_a_waiting_collection_is_replaced(
    bench: PublicationBench,
) -> None:
    gate = bench.fleet.script.hold("collect 0")
    request = CollectRequest(
        run=bench.run, epoch=1, update=0, policy_version=0, consumed_through=-1
    )
    collecting = asyncio.create_task(
        bench.activity.run(collect, bench.site, request, token_of(request, 1))
    )
    await bench.fleet.script.reached("collect 0")
    bench.fleet.live_router.deaf = True
    await until(lambda: bench.fleet.live_producer.urls == ("http://router.1",))
    gate.set()
    assert (await asyncio.wait_for(collecting, DEADLINE_S)).update == 0


async def test_a_router_that_hangs_under_a_publication_is_replaced(bench: PublicationBench) -> None:
    bench.fleet.live_router.deaf = True
    report = await bench.publish(1)
    assert report.version == 1
    assert bench.fleet.live_producer.urls == ("http://router.1",)
    assert bench.fleet.live_router.routable() == ["engine-0", "engine-1"]


async def test_an_engine_that_hangs_before_the_router_notices_is_replaced(
    bench: PublicationBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says no version any more, so the fleet wants it loaded again."""
    engine = bench.fleet.engine_list[1]
    engine.deaf = True
    restart = bench.fleet.heal_engines

    async def with_the_deaf(token: FenceToken, run: RunRef) -> tuple[EngineHandle, ...]:
        deaf = tuple(each.handle for each in bench.fleet.engine_list if each.deaf)
        return (*await restart(token, run), *deaf)

    monkeypatch.setattr(bench.fleet, "heal_engines", with_the_deaf)
    await heal(bench.site, bench.run, bench.token(0, 2), 5.0)
    assert "replace engine-1" in bench.log
    assert healed(bench, 1, incarnation=1)
    assert bench.fleet.live_router.routable() == ["engine-0", "engine-1"]


async def test_a_router_that_dies_under_a_heal_is_replaced_within_it(
    bench: PublicationBench,
) -> None:
    """Its engines are asked for while it dies, and the table finds it dead."""
    bench.fleet.kill_engine(0)
    gate = bench.fleet.script.hold("load engine-0 0")
    healing_now = asyncio.create_task(heal(bench.site, bench.run, bench.token(0, 2), 5.0))
    await bench.fleet.script.reached("load engine-0 0")
    bench.fleet.kill_router()
    gate.set()
    await asyncio.wait_for(healing_now, DEADLINE_S)
    assert bench.fleet.live_producer.urls == ("http://router.1",)
    assert bench.fleet.live_router.routable() == ["engine-0", "engine-1"]


async def test_an_engine_that_hangs_is_replaced_while_a_collection_waits(
    bench: PublicationBench,
) -> None:
    gate = bench.fleet.script.hold("collect 0")
    request = CollectRequest(
        run=bench.run, epoch=1, update=0, policy_version=0, consumed_through=-1
    )
    collecting = asyncio.create_task(
        bench.activity.run(collect, bench.site, request, token_of(request, 1))
    )
    await bench.fleet.script.reached("collect 0")
    bench.fleet.live_router.unavailable.add(("engine-0", 0))
    await until(lambda: healed(bench, 0, incarnation=1))
    assert "replace engine-0" in bench.log
    gate.set()
    assert (await asyncio.wait_for(collecting, DEADLINE_S)).update == 0


async def test_an_engine_of_other_weights_is_replaced(bench: PublicationBench) -> None:
    router = bench.fleet.live_router
    (first, second) = router.table.engines
    wrong = first.model_copy(update={"version": 7})
    router.table = router.table.model_copy(update={"engines": (wrong, second)})
    assert router.routable() == ["engine-1"]
    await heal(bench.site, bench.run, bench.token(0, 2), 5.0)
    assert healed(bench, 0, incarnation=1)


async def test_an_engine_that_is_being_updated_is_left_alone(bench: PublicationBench) -> None:
    router = bench.fleet.live_router
    rows = tuple(
        row.model_copy(update={"state": EngineState.UPDATING}) for row in router.table.engines
    )
    router.table = router.table.model_copy(update={"engines": rows})
    await heal(bench.site, bench.run, bench.token(0, 2), 5.0)
    assert not [call for call in bench.log if call.startswith("replace")]


def optimizing(bench: PublicationBench) -> "asyncio.Task[Any]":
    request = OptimizeRequest(run=bench.run, epoch=1, update=0, collection=COLLECTION)
    return asyncio.create_task(
        bench.activity.run(optimize, bench.site, request, token_of(request, 1))
    )


def checkpointing(bench: PublicationBench) -> "asyncio.Task[Any]":
    request = CheckpointRequest(run=bench.run, epoch=1, update=0, policy_version=0)
    return asyncio.create_task(
        bench.activity.run(checkpoint, bench.site, request, token_of(request, 1))
    )


@pytest.mark.parametrize(
    ("start", "call"), [(optimizing, "optimize 0"), (checkpointing, "save -1")]
)
async def test_engines_are_healed_while_the_trainer_works(
    bench: PublicationBench, start: Callable[[PublicationBench], "asyncio.Task[Any]"], call: str
) -> None:
    gate = bench.fleet.script.hold(call)
    working = start(bench)
    await bench.fleet.script.reached(call)
    bench.fleet.kill_engine(0)
    await until(lambda: healed(bench, 0, incarnation=1))
    bench.fleet.kill_router()
    await until(lambda: bench.fleet.live_producer.urls == ("http://router.1",))
    assert not working.done()
    gate.set()
    await asyncio.wait_for(working, DEADLINE_S)


async def test_a_heal_that_fails_leaves_the_update_alone_and_is_tried_again(
    bench: PublicationBench,
) -> None:
    gate = bench.fleet.script.hold("optimize 0")
    working = optimizing(bench)
    await bench.fleet.script.reached("optimize 0")
    for _ in range(2):
        bench.fleet.script.fail("load engine-0 0", ServiceUnreachable("no memory"))
    bench.fleet.kill_engine(0)
    await until(lambda: bench.log.count("load engine-0 0") >= 3)  # with that of the publication
    bench.fleet.kill_engine(1)
    await until(lambda: healed(bench, 0, 2) and healed(bench, 1, 1))
    gate.set()
    report = await asyncio.wait_for(working, DEADLINE_S)
    assert report.policy_version == 1
    assert [row["update"] for row in bench.rows(layout.UPDATES)] == [0]


async def test_engines_that_stay_lost_are_the_next_stages_error(bench: PublicationBench) -> None:
    gate = bench.fleet.script.hold("optimize 0")
    working = optimizing(bench)
    await bench.fleet.script.reached("optimize 0")
    bench.fleet.script.fail("heal", *[EngineLost("no GPU is left") for _ in range(4)])
    bench.fleet.kill_engine(0)
    await until(lambda: len(bench.fleet.script.faults["heal"]) < 4)
    gate.set()
    assert (await asyncio.wait_for(working, DEADLINE_S)).update == 0
    with pytest.raises(EngineLost, match="no GPU is left"):
        await bench.publish(1)


async def test_a_heal_in_the_making_is_waited_for(bench: PublicationBench) -> None:
    gate = bench.fleet.script.hold("load engine-0 0")
    began, over = asyncio.Event(), asyncio.Event()

    async def call() -> str:
        began.set()
        await over.wait()
        return "done"

    token = bench.token(0, 2)
    working = asyncio.create_task(beside_healing(bench.site, bench.run, token, bench.spec, call))
    await asyncio.wait_for(began.wait(), DEADLINE_S)
    bench.fleet.kill_engine(0)
    await until(lambda: "respawned engine-0" in bench.log)
    over.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not working.done()
    gate.set()
    assert await asyncio.wait_for(working, DEADLINE_S) == "done"
    assert healed(bench, 0, incarnation=1)


async def test_the_trainers_error_does_not_wait_for_engines(bench: PublicationBench) -> None:
    bench.fleet.script.hold("load engine-0 0")
    began, over = asyncio.Event(), asyncio.Event()

    async def call() -> None:
        began.set()
        await over.wait()
        raise TrainerLost("gone")

    token = bench.token(0, 2)
    working = asyncio.create_task(beside_healing(bench.site, bench.run, token, bench.spec, call))
    await asyncio.wait_for(began.wait(), DEADLINE_S)
    bench.fleet.kill_engine(0)
    await until(lambda: "respawned engine-0" in bench.log)
    over.set()
    with pytest.raises(TrainerLost):
        await asyncio.wait_for(working, DEADLINE_S)


async def test_a_failing_replacement_still_ends_what_needs_engines(
    bench: PublicationBench,
) -> None:
    began = asyncio.Event()

    async def call() -> None:
        began.set()
        await asyncio.Event().wait()

    token = bench.token(0, 2)
    working = asyncio.create_task(with_healing(bench.site, bench.run, token, bench.spec, call))
    await asyncio.wait_for(began.wait(), DEADLINE_S)
    for _ in range(2):
        bench.fleet.script.fail("load engine-0 0", ServiceUnreachable("no memory"))
    bench.fleet.live_router.unavailable.add(("engine-0", 0))
    with pytest.raises(EngineLost, match="no memory"):
        await asyncio.wait_for(working, DEADLINE_S)


async def test_serving_reports_reach_the_tracker_from_any_activity(
    bench: PublicationBench,
) -> None:
    metrics = {"errors/elapsed_seconds": 15.0, "errors/fatal": 0.0}
    bench.fleet.live_producer.serving_reports.append(
        ServingReport(number=1, time_unix=1.0, metrics=metrics)
    )
    await optimizing(bench)
    await checkpointing(bench)
    rows: list[dict[str, float]] = bench.site.tracker.rows  # type: ignore[attr-defined]
    assert [row for row in rows if "errors/fatal" in row] == [metrics]
