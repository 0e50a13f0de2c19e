"""Publication to a fully async run over real HTTP: order of phases, and what engines may do."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from activities.storage import layout
from activities.wire.digest import weights_digest
from models.errors import ContractViolation, EngineLost, ServiceUnreachable, StaleFence
from models.routing import EngineState
from tests.support.fake_engines import checksums_of
from tests.support.fault_proxy import Answer, Close, FaultProxy, Hang
from tests.support.http_engines import CHECK, LOAD, PAUSE, RESUME, HttpFleet
from tests.support.publication_bench import (
    PublicationBench,
    async_document,
    publication_bench,
)

DEADLINE_S = 20.0
PATIENCE_S = 1.5
"""``inference.update_timeout_s`` where an engine is silent."""
OWN_WORDS = "CUDA error: an illegal memory access was encountered"


@pytest.fixture
async def bench(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[PublicationBench]:
    mode, _, silent = getattr(request, "param", "refresh").partition(" ")
    timeouts = {"update_timeout_s": PATIENCE_S} if silent else {}
    async with HttpFleet() as fleet:
        document = async_document(tmp_path, mode, **timeouts)
        yield await publication_bench(fleet, document, fleet.site())


def fleet_of(bench: PublicationBench) -> HttpFleet:
    assert isinstance(bench.fleet, HttpFleet)
    return bench.fleet


def served(bench: PublicationBench) -> list[tuple[str, int, bool]]:
    return [(each.name, each.version, each.paused) for each in bench.fleet.engine_list]


@pytest.mark.parametrize("healthy", [True, False])
async def test_the_fleet_is_healed_while_the_trainer_exports(
    bench: PublicationBench, healthy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails there is told when the export has ended as well."""
    await bench.publish(0)
    healing = asyncio.Event()
    ensure_engines = bench.fleet.ensure_engines

    async def heal(*arguments: Any) -> Any:
        healing.set()
        if not healthy:
            raise StaleFence("another epoch owns the root")
        return await ensure_engines(*arguments)

    monkeypatch.setattr(bench.fleet, "ensure_engines", heal)
    gate = bench.fleet.script.hold("export_weights 1")
    publishing = asyncio.create_task(bench.publish(1))
    async with asyncio.timeout(DEADLINE_S):
        await bench.fleet.script.reached("export_weights 1")
        await healing.wait()
    assert not publishing.done()
    gate.set()
    if healthy:
        assert (await asyncio.wait_for(publishing, DEADLINE_S)).version == 1
        return
    with pytest.raises(StaleFence, match="another epoch"):
        await asyncio.wait_for(publishing, DEADLINE_S)


@pytest.mark.parametrize("bench", ["refresh", "barrier"], indirect=True)
async def test_each_phase_ends_on_every_engine_before_the_next(bench: PublicationBench) -> None:
    await bench.publish(0)
    del bench.log[:]
    # The first engine is the slower one in each phase.
    gates = {step: bench.fleet.script.hold(f"{step} engine-0") for step in ("pause", "load")}
    publishing = asyncio.create_task(bench.publish(1))
    for step, gate in gates.items():
        await bench.fleet.script.reached(f"{step} engine-0")
        await bench.fleet.script.reached(f"{step} engine-1")
        gate.set()
    report = await asyncio.wait_for(publishing, DEADLINE_S)
    assert [each.digest for each in report.engines] == [weights_digest(checksums_of(1))] * 2
    steps = [call for call in bench.log if not call.startswith("export")]
    both = [sorted(steps[at : at + 2]) for at in range(2, 10, 2)]
    assert steps[:2] == ["begin_publication 1", "table 1"]
    assert both == [[f"{step} engine-0", f"{step} engine-1"] for step in
                    ("pause", "load", "verify", "resume")]  # fmt: skip
    assert steps[10:] == ["table 1", "end_publication 1"]
    closed, opened = bench.fleet.live_router.tables[-2:]
    assert {each.state for each in closed.engines} == {EngineState.UPDATING}
    assert [(each.name, each.state, each.version) for each in opened.engines] == [
        ("engine-0", EngineState.SERVING, 1),
        ("engine-1", EngineState.SERVING, 1),
    ]
    assert opened.committed == ((1, weights_digest(checksums_of(1))),)
    assert bench.fleet.live_producer.urls == ("http://router.0",)
    assert bench.fleet.live_producer.published == 1


async def test_the_row_of_a_publication(bench: PublicationBench) -> None:
    await bench.publish(0)
    await bench.publish(0, attempt=2)
    first, again = bench.rows(layout.PUBLICATION)
    expected = {"mode": "refresh", "transport": "disk", "version": 0, "repeated_version": False,
                "tensors": 1, "bytes": 8, "buckets": 1, "replaced": []}  # fmt: skip
    assert expected.items() <= first.items()
    assert (again["repeated_version"], again["buckets"]) == (True, 0)
    for row in (first, again):
        parts = ("pause_connect", "export_pack", "transport_load", "finalize")
        seconds = [row[f"{part}_seconds"] for part in parts]
        assert all(each >= 0 for each in seconds)
        assert 0 < sum(seconds) <= row["total_seconds"]


def refuses(path: str) -> Callable[[FaultProxy], None]:
    return lambda proxy: proxy.fail_next(Answer(500, {"error": {"message": OWN_WORDS}}), path=path)


def is_silent(path: str) -> Callable[[FaultProxy], None]:
    return lambda proxy: proxy.fail_next(Hang(), path=path)


def breaks(path: str) -> Callable[[FaultProxy], None]:
    return lambda proxy: proxy.fail_next(Close(), path=path)


FAULTS = {
    "500 at begin": (refuses(PAUSE), "pause", OWN_WORDS),
    "500 in the middle": (refuses(LOAD), "load", OWN_WORDS),
    "500 when asked for its weights": (refuses(CHECK), "verify", OWN_WORDS),
    "500 at commit": (refuses(RESUME), "resume", OWN_WORDS),
    "dies in the middle": (breaks(LOAD), "load", "hung up"),
    "refuses the folder": (
        lambda proxy: proxy.fail_next(
            Answer(200, {"success": False, "message": "size mismatch for lm_head"}), path=LOAD
        ),
        "load",
        "size mismatch for lm_head",
    ),
}


SILENCES = {
    "silent at begin": (is_silent(PAUSE), "pause", "no end of pause within 1.5 s"),
    "silent in the middle": (is_silent(LOAD), "load", "within 1.5 s"),
    "silent at commit": (is_silent(RESUME), "resume", "no end of resume within 1.5 s"),
}


@pytest.mark.parametrize("bench", ["refresh", "barrier", "rolling"], indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failing_engine_is_replaced_and_the_next_publication_succeeds(
    bench: PublicationBench, fault: str
) -> None:
    await check_replacement(bench, *FAULTS[fault])


@pytest.mark.parametrize("bench", ["refresh silent", "rolling silent"], indirect=True)
@pytest.mark.parametrize("fault", SILENCES)
async def test_a_silent_engine_is_replaced_within_the_deadline(
    bench: PublicationBench, fault: str
) -> None:
    await check_replacement(bench, *SILENCES[fault])


async def check_replacement(
    bench: PublicationBench, inject: Callable[[FaultProxy], None], phase: str, words: str
) -> None:
    """Publish while engine 0 fails as told, then once more."""
    await bench.publish(0)
    broken = bench.fleet.engine_list[0]
    inject(fleet_of(bench).proxies["engine-0"])
    report = await asyncio.wait_for(bench.publish(1), DEADLINE_S)
    (failure,) = report.replaced
    assert (failure.engine, failure.incarnation, failure.phase) == ("engine-0", 0, phase)
    assert words in failure.error
    assert not broken.alive
    assert served(bench) == [("engine-0", 1, False), ("engine-1", 1, False)]
    assert bench.fleet.engine_list[0].incarnation == 1
    assert bench.fleet.live_router.routable() == ["engine-0", "engine-1"]
    assert bench.fleet.live_producer.publishing is None
    (row,) = bench.rows(layout.PUBLICATION)[1:]
    assert words in row["replaced"][0]["error"]
    following = await asyncio.wait_for(bench.publish(2), DEADLINE_S)
    assert following.replaced == ()
    assert served(bench) == [("engine-0", 2, False), ("engine-1", 2, False)]


@pytest.mark.parametrize("bench", ["refresh", "rolling"], indirect=True)
async def test_a_second_failure_ends_the_publication_with_the_boundary_closed(
    bench: PublicationBench,
) -> None:
    await bench.publish(0)
    fleet = fleet_of(bench)
    refuses(LOAD)(fleet.proxies["engine-0"])
    ensure = fleet.ensure_engines

    async def ensure_the_same_fault(*args: Any) -> Any:
        former = fleet.engine_list[0]
        engines = await ensure(*args)
        if fleet.engine_list[0] is not former:
            refuses(LOAD)(fleet.proxies["engine-0"])
        return engines

    fleet.ensure_engines = ensure_the_same_fault  # type: ignore[method-assign]
    with pytest.raises(ContractViolation, match=OWN_WORDS):
        await asyncio.wait_for(bench.publish(1), DEADLINE_S)
    assert fleet.engine_list[0].paused
    assert "engine-0" not in fleet.live_router.routable()
    assert fleet.live_producer.publishing == 1
    fleet.ensure_engines = ensure  # type: ignore[method-assign]
    fleet.live_trainer.policy_version = 1
    await asyncio.wait_for(bench.publish(1, attempt=2), DEADLINE_S)
    assert served(bench) == [("engine-0", 1, False), ("engine-1", 1, False)]
    assert fleet.live_producer.published == 1


@pytest.mark.parametrize("bench", ["refresh silent"], indirect=True)
async def test_a_replacement_that_is_silent_as_well_is_lost(bench: PublicationBench) -> None:
    await bench.publish(0)
    fleet = fleet_of(bench)
    spawn = fleet.spawn

    async def spawn_silent(name: str, incarnation: int) -> Any:
        engine = await spawn(name, incarnation)
        is_silent(LOAD)(fleet.proxies[name])
        return engine

    fleet.spawn = spawn_silent  # type: ignore[method-assign]
    is_silent(LOAD)(fleet.proxies["engine-1"])
    with pytest.raises(EngineLost, match=r"publication of version 1: .*load"):
        await asyncio.wait_for(bench.publish(1), DEADLINE_S)


@pytest.mark.parametrize("bench", ["refresh", "rolling"], indirect=True)
async def test_a_publication_that_was_cut_off_goes_on(bench: PublicationBench) -> None:
    await bench.publish(0)
    gate = bench.fleet.script.hold("load engine-1")
    publishing = asyncio.create_task(bench.publish(1))
    await bench.fleet.script.reached("load engine-1")
    while bench.fleet.engine_list[0].version != 1:
        await asyncio.sleep(0.001)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    gate.set()
    assert bench.fleet.live_producer.publishing == 1
    del bench.log[:]
    report = await asyncio.wait_for(bench.publish(1, attempt=2), DEADLINE_S)
    assert report.replaced == ()
    assert served(bench) == [("engine-0", 1, False), ("engine-1", 1, False)]
    assert "load engine-0" not in bench.log
    assert bench.log.count("resume engine-0") == 1
    assert bench.fleet.live_producer.published == 1


async def test_who_lost_the_epoch_loads_nothing(bench: PublicationBench) -> None:
    await bench.publish(0)
    (Path(bench.run.root) / "lease").mkdir(exist_ok=True)
    (Path(bench.run.root) / layout.epoch_file(2)).write_text("{}")
    del bench.log[:]
    with pytest.raises(StaleFence, match="epoch 2 owns the root"):
        await bench.publish(1)
    assert not [call for call in bench.log if call.startswith(("load", "resume"))]


async def test_nothing_moves_when_everything_is_served(bench: PublicationBench) -> None:
    await bench.publish(0)
    await bench.publish(1)
    del bench.log[:]
    report = await bench.publish(1, attempt=2)
    assert report.repeated_version
    kinds = {call.split()[0] for call in bench.log}
    assert kinds == {"export_weights", "begin_publication", "table", "verify", "resume",
                     "end_publication"}  # fmt: skip


@pytest.mark.parametrize("bench", ["rolling"], indirect=True)
async def test_a_rolling_publication_takes_one_engine_after_the_other(
    bench: PublicationBench,
) -> None:
    await bench.publish(0)
    del bench.log[:]
    report = await bench.publish(1)
    assert [each.engine for each in report.engines] == ["engine-0", "engine-1"]
    one = ["drain {0}", "table 0,1", "pause {0}", "load {0}", "verify {0}", "resume {0}",
           "table 0,1"]  # fmt: skip
    names = ("engine-0", "engine-1")
    each = itertools.chain.from_iterable([call.format(name) for call in one] for name in names)
    assert bench.log == [
        "export_weights 1", "begin_publication 1", "table 0,1", *each, "table 1",
        "end_publication 1",
    ]  # fmt: skip
    for table in bench.fleet.live_router.tables[1:]:
        serving = [each for each in table.engines if each.state is EngineState.SERVING]
        assert serving, "no engine was left to serve"
    events = bench.rows(layout.ROLLING_PUBLICATION)
    told = [(row["event"], row.get("engine")) for row in events]
    stages = ("drain_started", "drain_finished", "update_started", "update_finished",
              "engine_reopened")  # fmt: skip
    assert told[-12:] == [
        ("snapshot_ready", None),
        *((stage, name) for name in names for stage in stages),
        ("snapshot_released", None),
    ]
    assert all({"event", "time", "monotonic"} <= row.keys() for row in events)
    times = [row["monotonic"] for row in events]
    assert times == sorted(times)


@pytest.mark.parametrize("bench", ["rolling"], indirect=True)
async def test_an_engine_that_does_not_drain_is_replaced(bench: PublicationBench) -> None:
    await bench.publish(0)
    bench.fleet.script.fail("drain engine-1", ServiceUnreachable("it owes 3 calls"))
    report = await bench.publish(1)
    (failure,) = report.replaced
    assert (failure.engine, failure.phase, failure.error) == (
        "engine-1",
        "drain",
        "it owes 3 calls",
    )
    given_up = [
        table
        for table in bench.fleet.live_router.tables
        if EngineState.UNAVAILABLE in {each.state for each in table.engines}
    ]
    assert given_up, "it stayed in the table while it was replaced"
    assert bench.fleet.live_router.routable() == ["engine-0", "engine-1"]
    events = [row["event"] for row in bench.rows(layout.ROLLING_PUBLICATION)]
    assert "engine_unavailable" in events


@pytest.mark.parametrize(
    ("bench", "call"),
    [
        ("refresh", "load engine-0"),
        ("barrier", "resume engine-1"),
        ("rolling", "drain engine-0"),
        ("rolling", "load engine-1"),
    ],
    indirect=["bench"],
)
async def test_a_router_that_dies_meanwhile_is_replaced(bench: PublicationBench, call: str) -> None:
    await bench.publish(0)
    del bench.log[:]
    gate = bench.fleet.script.hold(call)
    publishing = asyncio.create_task(bench.publish(1))
    async with asyncio.timeout(DEADLINE_S):
        while call not in bench.log:
            await asyncio.sleep(0.001)
    bench.fleet.kill_router()
    gate.set()
    report = await asyncio.wait_for(publishing, DEADLINE_S)
    assert [each.version for each in report.engines] == [1, 1]
    assert served(bench) == [("engine-0", 1, False), ("engine-1", 1, False)]
    assert bench.fleet.live_router.incarnation == 1
    assert bench.fleet.live_router.routable() == ["engine-0", "engine-1"]
    assert bench.fleet.live_producer.urls == ("http://router.1",)
    assert bench.fleet.live_producer.published == 1
