"""The observer of a pipeline: rows on their ticks, events in order, faults logged and no more."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from activities.rollout.engine_occupancy import EngineOccupancy, EngineRow
from activities.rollout.observer import LifecycleEvent, PipelineObserver
from activities.rollout.occupancy import OCCUPANCY_KEYS
from activities.rollout.row_writer import RowWriter
from activities.storage.layout import PIPELINE_LIFECYCLE, PIPELINE_OCCUPANCY
from activities.storage.store import Store
from models.errors import ServiceUnreachable, StorageFull
from models.ids import FenceToken
from models.routing import RoutedEngine, RoutedEngineStatus, RouterState, RoutingTable
from tests.support.metrics_server import serving

DEADLINE_S = 10.0


class Ticks:
    """Stands in for ``asyncio.sleep``: a wait ends when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[float, list[asyncio.Event]] = defaultdict(list)
        self._changed = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        due = asyncio.Event()
        self.asked[seconds].append(due)
        self._changed.set()
        await due.wait()

    async def waits(self, seconds: float, times: int) -> None:
        """Return when ``seconds`` was waited for so many times."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.asked[seconds]) < times:
                self._changed.clear()
                await self._changed.wait()

    def tick(self, seconds: float) -> None:
        self.asked[seconds][-1].set()


class Engines(EngineOccupancy):
    """Counts how often it is asked."""

    REL = "checkpoints/engine.jsonl"

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.asked = 0

    async def rows(self) -> list[EngineRow]:
        self.asked += 1
        return [EngineRow(self.REL, {"asked": self.asked})]


def observer(
    store: Store, interval_s: float, ticks: Ticks, snapshot: Any = lambda: {}
) -> tuple[PipelineObserver, Engines]:
    engines = Engines()
    made = PipelineObserver(
        store, snapshot, interval_s, lambda: None, engines=engines, sleep=ticks.sleep
    )
    return made, engines


async def test_engines_are_asked_less_often_than_the_producer(tmp_path: Path) -> None:
    store, ticks = Store(str(tmp_path)), Ticks()
    held = {"producer_owned_groups": 0}
    watched, engines = observer(store, 1.0, ticks, lambda: dict(held))
    watched.start()
    watched.start()
    await ticks.waits(1.0, 1)
    await ticks.waits(5.0, 1)
    held["producer_owned_groups"] = 3
    ticks.tick(1.0)
    await ticks.waits(1.0, 2)
    assert engines.asked == 1
    ticks.tick(5.0)
    await ticks.waits(5.0, 2)
    assert engines.asked == 2
    await watched.aclose()
    rows = store.read_jsonl(PIPELINE_OCCUPANCY).rows
    assert [row["producer_owned_groups"] for row in rows] == [0, 3]
    assert store.read_jsonl(Engines.REL).rows == [{"asked": 1}, {"asked": 2}]


async def test_a_long_interval_is_that_of_the_engines_too(tmp_path: Path) -> None:
    ticks = Ticks()
    watched, engines = observer(Store(str(tmp_path)), 7.0, ticks)
    watched.start()
    await ticks.waits(7.0, 2)
    assert set(ticks.asked) == {7.0}
    assert engines.asked == 1
    await watched.aclose()


async def test_a_row_has_every_key_and_null_for_what_is_not_told(tmp_path: Path) -> None:
    store, ticks = Store(str(tmp_path)), Ticks()
    watched, _ = observer(store, 2.0, ticks, lambda: {"producer_owned_groups": 5, "other": 1})
    watched.start()
    await ticks.waits(2.0, 1)
    await watched.aclose()
    (row,) = store.read_jsonl(PIPELINE_OCCUPANCY).rows
    assert set(row) == set(OCCUPANCY_KEYS)
    told = {key: value for key, value in row.items() if value is not None}
    assert told.pop("time_unix") > 1.7e9
    assert told == {"producer_owned_groups": 5}


async def test_without_an_interval_only_events_are_recorded(tmp_path: Path) -> None:
    store, ticks = Store(str(tmp_path)), Ticks()
    watched, engines = observer(store, 0.0, ticks)
    watched.start()
    watched.event("shutdown_start")
    await watched.aclose()
    assert not ticks.asked
    assert engines.asked == 0
    assert not store.exists(PIPELINE_OCCUPANCY)
    assert [row["event"] for row in store.read_jsonl(PIPELINE_LIFECYCLE).rows] == ["shutdown_start"]


async def test_events_keep_their_order_and_the_snapshot_of_their_moment(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    active = [0]
    watched, _ = observer(store, 1.0, Ticks(), lambda: {"generation_active_calls": active[0]})
    events: tuple[LifecycleEvent, ...] = (
        "generation_paused", "generation_resumed", "shutdown_start", "shutdown_complete",
    )  # fmt: skip
    for number, name in enumerate(events * 10):
        active[0] = number
        watched.event(name)
    await watched.aclose()
    rows = store.read_jsonl(PIPELINE_LIFECYCLE).rows
    assert [row["event"] for row in rows] == list(events * 10)
    assert [row["generation_active_calls"] for row in rows] == list(range(40))
    assert all(set(row) == {"event", *OCCUPANCY_KEYS} for row in rows)


async def test_an_event_after_the_end_is_lost_and_harmless(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    watched, _ = observer(store, 1.0, Ticks())
    await watched.aclose()
    watched.event("shutdown_complete")
    assert watched.writer.lost == 1
    assert not store.exists(PIPELINE_LIFECYCLE)


class FullStore(Store):
    """Has no room for the first rows."""

    def __init__(self, root: str, failures: int) -> None:
        super().__init__(root)
        self.failures = failures

    def append_rows(self, rel: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self.failures:
            self.failures -= 1
            raise StorageFull("no space left")
        super().append_rows(rel, rows)


async def test_a_full_disk_costs_the_rows_that_met_it(tmp_path: Path) -> None:
    store, ticks = FullStore(str(tmp_path), failures=3), Ticks()
    watched, _ = observer(store, 1.0, ticks)
    for _ in range(5):
        watched.event("generation_paused")
    await watched.aclose()
    assert watched.writer.lost == 3
    assert len(store.read_jsonl(PIPELINE_LIFECYCLE).rows) == 2


class HangingStore(Store):
    """Every write waits until the test lets go."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.let_go = threading.Event()

    def append_rows(self, rel: str, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self.let_go.wait(DEADLINE_S)
        super().append_rows(rel, rows)


async def test_a_hanging_storage_neither_grows_nor_holds_up(tmp_path: Path) -> None:
    store = HangingStore(str(tmp_path))
    writer = RowWriter(store, max_queued_rows=4)
    for number in range(100):
        writer.put("rows.jsonl", {"number": number})
    assert writer.lost == 96
    await writer.aclose(timeout_s=0.0)
    writer.put("rows.jsonl", {"number": 100})
    assert writer.lost == 97
    store.let_go.set()


async def test_rows_for_a_bucket_are_gathered(tmp_path: Path) -> None:
    """Each write to it is an object; what waits for the end is written by the end."""
    store = Store(f"memory://bucket/{tmp_path.name}")
    writer = RowWriter(store, max_queued_rows=8)
    for number in range(3):
        writer.put("a.jsonl", {"number": number})
        writer.put("b.jsonl", {"number": number})
        await asyncio.sleep(0)
    assert store.list("") == [], "neither the time nor the queue's half is over"
    await writer.aclose()
    for name in ("a", "b"):
        assert [row["number"] for row in store.read_jsonl(f"{name}.jsonl").rows] == [0, 1, 2]
        assert len(store.list(f"{name}.jsonl.parts")) == 1
    assert writer.lost == 0


async def test_a_half_full_queue_is_written_at_once(tmp_path: Path) -> None:
    store = Store(f"memory://bucket/{tmp_path.name}")
    writer = RowWriter(store, max_queued_rows=8)
    for number in range(6):
        writer.put("a.jsonl", {"number": number})
    async with asyncio.timeout(5):
        while len(store.read_jsonl("a.jsonl").rows) < 6:
            await asyncio.sleep(0.01)
    await writer.aclose()
    assert writer.lost == 0


async def test_a_snapshot_that_raises_ends_the_observation_only(tmp_path: Path) -> None:
    store, ticks = Store(str(tmp_path)), Ticks()

    def broken() -> Mapping[str, Any]:
        raise AttributeError("no such thing")

    watched, engines = observer(store, 1.0, ticks, broken)
    watched.start()
    await ticks.waits(5.0, 1)
    ticks.tick(5.0)
    await ticks.waits(5.0, 2)
    assert engines.asked == 2
    await watched.aclose()
    assert not store.exists(PIPELINE_OCCUPANCY)


class Router:
    """Knows these engines; implements ``RouterControl``."""

    def __init__(self, *urls: str, error: Exception | None = None, hangs: bool = False) -> None:
        self.urls = urls
        self.error = error
        self.hangs = hangs
        self.closed = 0

    async def set_table(self, token: FenceToken, table: RoutingTable) -> None:
        raise NotImplementedError

    async def drain(self, token: FenceToken, engine: str, timeout_s: float) -> None:
        raise NotImplementedError

    async def state(self) -> RouterState:
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return RouterState(
            engines=tuple(
                RoutedEngineStatus(
                    engine=RoutedEngine(name=url, url=url, incarnation=0, version=0, digest="d"),
                    routable=True,
                    active_calls=0,
                    reserved_calls=0,
                    failed_checks=0,
                )
                for url in self.urls
            ),
            active_calls=0,
            waiting_calls=0,
        )

    async def aclose(self) -> None:
        self.closed += 1


async def test_every_engine_of_the_router_has_its_file() -> None:
    text = 'sglang:num_running_reqs{rank="0"} 2\nsglang:num_running_reqs{rank="1"} NaN\n'
    async with (
        asyncio.timeout(DEADLINE_S),
        serving("200 OK", text) as alive,
        serving("503 Service Unavailable", "") as ailing,
    ):
        router = Router(alive, ailing)
        engines = EngineOccupancy(lambda: "http://router", connect=lambda url: router)
        (first, second) = await engines.rows()
        await engines.aclose()
    assert (
        first.rel == f"checkpoints/engine_occupancy_{sha256(alive.encode()).hexdigest()[:12]}.jsonl"
    )
    assert first.row.pop("time_unix") > 1.7e9
    assert first.row == {
        "engine": alive,
        "series": [
            {"name": "num_running_reqs", "labels": {"rank": "0"}, "value": 2.0},
            {"name": "num_running_reqs", "labels": {"rank": "1"}, "value": None},
        ],
    }
    assert second.rel != first.rel
    assert set(second.row) == {"time_unix", "engine", "error"}
    assert "503" in second.row["error"]
    assert router.closed == 1


@pytest.mark.parametrize(
    ("url", "router", "said"),
    [
        (None, Router(), "no router is known yet"),
        ("http://router", Router(error=ServiceUnreachable("router is gone")), "router is gone"),
        ("http://router", Router(hangs=True), "did not tell its state"),
    ],
)
async def test_engines_that_are_not_found_are_told_in_one_row(
    url: str | None, router: Router, said: str
) -> None:
    engines = EngineOccupancy(lambda: url, connect=lambda url: router, limit_s=0.01)
    ((rel, row),) = await engines.rows()
    assert rel == "checkpoints/engine_occupancy.jsonl"
    assert set(row) == {"time_unix", "discovery_error"}
    assert said in row["discovery_error"]
    await engines.aclose()
