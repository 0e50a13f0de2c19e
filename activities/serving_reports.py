"""The ``errors/`` metrics of a producer on their way to the tracker.

``rollout_errors.jsonl`` is written by the producer and is the truth; the tracker gets a copy while
somebody waits for a collection. A copy is worth no failure: whatever goes wrong is logged.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache

import structlog

from activities.site import Site
from models.errors import PerdureError
from models.ids import RunRef
from models.ports import ProducerPort, ServingReport

INTERVAL_S = 15.0
"""Producers report as often."""
LIMIT_S = 10.0
"""For one answer of the producer, which gives it from memory."""
JOIN_S = 2.0
"""Longest that the end of a stage is held up by an answer that is on its way."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Cursor:
    """The newest report of a run that this process has relayed."""

    last: ServingReport | None = None
    due: float = 0.0
    """Monotonic seconds."""


@lru_cache(maxsize=16)
def _cursor_of(run: RunRef) -> _Cursor:
    return _Cursor()


@asynccontextmanager
async def relaying(site: Site, run: RunRef) -> AsyncIterator[None]:
    """Relay every 15 seconds within the block, and once more when an error leaves it."""
    stop = asyncio.Event()
    task = asyncio.create_task(_relay_until(stop, site, run), name="serving reports")
    try:
        yield
    except PerdureError:
        _cursor_of(run).due = 0.0  # the error may be the newest report's
        raise
    finally:
        stop.set()
        await asyncio.wait({task}, timeout=JOIN_S)
        task.cancel()


async def relay(site: Site, run: RunRef) -> int:
    """Give the tracker what the producer reported since the last time; returns how many."""
    cursor = _cursor_of(run)
    cursor.due = time.monotonic() + INTERVAL_S
    try:
        async with asyncio.timeout(LIMIT_S):
            reports = await _unseen(site.fleet.producer(run), cursor.last)
    except (PerdureError, TimeoutError) as error:
        _log.warning("serving_reports_not_relayed", run=run.run_id, reason=repr(error))
        return 0
    for report in reports:
        site.tracker.log(run, report.metrics)
        cursor.last = report
    return len(reports)


async def _relay_until(stop: asyncio.Event, site: Site, run: RunRef) -> None:
    """Relay whenever it is due. An end of the block ends the wait, and is looked at once."""
    while True:
        stopped = stop.is_set()
        wait_s = _cursor_of(run).due - time.monotonic()
        if wait_s <= 0:
            await relay(site, run)
        elif not stopped:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await stop.wait()
        if stopped:
            return


async def _unseen(producer: ProducerPort, last: ServingReport | None) -> tuple[ServingReport, ...]:
    """Reports after ``last``.

    Numbers begin anew with each process. One that goes on still has the last report, so that is
    asked for as well; a process that answers with another one is new.
    """
    if last is None:
        return await producer.reports(0)
    reports = await producer.reports(last.number - 1)
    if reports and reports[0] == last:
        return reports[1:]
    return await producer.reports(0)
