"""What a fully async producer holds, and how busy its engines are, as time series and events.

| file | row |
|---|---|
| ``pipeline_occupancy.jsonl`` | a snapshot every interval |
| ``pipeline_lifecycle.jsonl`` | the same snapshot at a boundary, with the event's name |
| ``engine_occupancy_*.jsonl`` | gauges of one engine |

Nothing here may disturb a run: what cannot be written or reached is logged.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import structlog

from activities.rollout.engine_occupancy import EngineOccupancy
from activities.rollout.occupancy import OCCUPANCY_KEYS
from activities.rollout.row_writer import CLOSE_S, RowWriter
from activities.storage import layout
from activities.storage.store import Store

ENGINE_INTERVAL_S = 5.0
"""Engines are never asked more often."""

LifecycleEvent = Literal[
    "shutdown_start",
    "shutdown_complete",
    "shutdown_incomplete",
    "generation_paused",
    "generation_resumed",
]

_log = structlog.get_logger(__name__)


class PipelineObserver:
    """Observes from ``start`` to ``aclose``; belongs to one event loop.

    Events are recorded whatever the interval, and before ``start`` as well.
    """

    def __init__(
        self,
        store: Store,
        snapshot: Callable[[], Mapping[str, Any]],
        interval_s: float,
        router_url: Callable[[], str | None],
        *,
        engines: EngineOccupancy | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Take what to observe.

        Args:
            store: the run's root.
            snapshot: ``Occupancy.row`` of this moment; must not block.
            interval_s: seconds between two rows; 0 observes events only.
            router_url: where the router is now; None while there is none.
            engines: stands in for the engines of the router, for tests.
            sleep: waits between rows; a seam for tests.
        """
        self._writer = RowWriter(store)
        self._snapshot = snapshot
        self._interval_s = interval_s
        self._engines = engines or EngineOccupancy(router_url)
        self._sleep = sleep
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def writer(self) -> RowWriter:
        """The queue of rows, for other observations of the same producer."""
        return self._writer

    @property
    def observes(self) -> bool:
        """Whether there is anything to observe but events."""
        return self._interval_s > 0

    def start(self) -> None:
        """Observe from now on; started again, it does nothing."""
        if self._tasks or not self.observes:
            return
        engine_interval_s = max(ENGINE_INTERVAL_S, self._interval_s)
        for loop in (
            self._every(self._interval_s, self._observe_pipeline),
            self._every(engine_interval_s, self._observe_engines),
        ):
            task = asyncio.ensure_future(loop)
            task.add_done_callback(_tell_death)
            self._tasks.append(task)

    def event(self, name: LifecycleEvent) -> None:
        """Record a boundary with the snapshot of this moment. Returns at once; order is kept."""
        self._writer.put(layout.PIPELINE_LIFECYCLE, {"event": name, **self._row()})

    async def aclose(self) -> None:
        """Observe no longer; what was observed is written within ``row_writer.CLOSE_S``."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        await self._engines.aclose()
        await self._writer.aclose()

    async def _every(self, seconds: float, observe: Callable[[], Awaitable[None]]) -> None:
        while True:
            await observe()
            await self._sleep(seconds)

    async def _observe_pipeline(self) -> None:
        self._writer.put(layout.PIPELINE_OCCUPANCY, self._row())

    async def _observe_engines(self) -> None:
        for rel, row in await self._engines.rows():
            self._writer.put(rel, row)

    def _row(self) -> dict[str, Any]:
        """Every key of the table; null for what the snapshot does not tell."""
        told = {"time_unix": time.time(), **self._snapshot()}
        return {key: told.get(key) for key in OCCUPANCY_KEYS}


def _tell_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("observation_ended", error=repr(error))
