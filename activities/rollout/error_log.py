"""``rollout_errors.jsonl`` and its reports: serving errors every 15 seconds and at the end."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType

import structlog

from activities.rollout.recovery import ServingHealth
from activities.storage.layout import ROLLOUT_ERRORS
from activities.storage.store import Store
from models.errors import PerdureError, StaleFence
from models.ports import ServingReport

REPORT_INTERVAL_S = 15.0
FATAL_CHARS = 1024
KEPT_REPORTS = 256
"""More than an hour of reports for a worker that asks rarely."""

_log = structlog.get_logger(__name__)


class ErrorLog:
    """Reports the ``errors/`` metrics. Never raises: a full disk is logged."""

    def __init__(self, store: Store, health: ServingHealth) -> None:
        self._store = store
        self._health = health
        self._reporter: asyncio.Task[None] | None = None
        self._reports: deque[ServingReport] = deque(maxlen=KEPT_REPORTS)
        self._last_number = 0

    def reports(self, after: int) -> tuple[ServingReport, ...]:
        """Reports numbered above ``after``, as far as they are kept."""
        return tuple(report for report in self._reports if report.number > after)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Report from now on; a fatal error that leaves the block is reported at once."""
        if self._reporter is None:
            self._reporter = asyncio.ensure_future(self._run())
        async with AsyncExitStack() as stack:
            stack.push_async_exit(self._report_exit)
            yield

    async def report(self, fatal: BaseException | None = None) -> None:
        """Report now; ``fatal`` is the error that ended the producer's work."""
        metrics = {**self._health.metrics(), "errors/fatal": int(fatal is not None)}
        now = time.time()
        self._last_number += 1
        self._reports.append(
            ServingReport(number=self._last_number, time_unix=now, metrics=metrics)
        )
        row = {**metrics, "time_unix": now, "fatal": None if fatal is None else _summary(fatal)}
        try:
            await asyncio.to_thread(self._store.append_jsonl, ROLLOUT_ERRORS, row)
        except (OSError, PerdureError) as error:
            _log.warning("rollout_errors_not_written", error=str(error))

    async def aclose(self) -> None:
        """Report for the last time."""
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.wait({self._reporter})
            await self.report()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            await self.report()

    async def _report_exit(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, StaleFence):
            return
        retryable = isinstance(error, PerdureError) and error.retryable
        await self.report(fatal=None if retryable else error)


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:FATAL_CHARS]}"
