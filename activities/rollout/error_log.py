"""``rollout_errors.jsonl``: the serving errors of a producer, every 15 seconds and at its end."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType

import structlog

from activities.rollout.recovery import ServingHealth
from activities.storage.layout import ROLLOUT_ERRORS
from activities.storage.store import Store
from models.errors import PerdureError, StaleFence

REPORT_INTERVAL_S = 15.0
FATAL_CHARS = 1024

_log = structlog.get_logger(__name__)


class ErrorLog:
    """Appends one row of ``errors/`` metrics a report. Never raises: a full disk is logged."""

    def __init__(self, store: Store, health: ServingHealth) -> None:
        self._store = store
        self._health = health
        self._reporter: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Report from now on; a fatal error that leaves the block is reported at once."""
        if self._reporter is None:
            self._reporter = asyncio.ensure_future(self._run())
        async with AsyncExitStack() as stack:
            stack.push_async_exit(self._report_exit)
            yield

    async def report(self, fatal: BaseException | None = None) -> None:
        """Append a row; ``fatal`` is the error that ended the producer's work."""
        row = {
            **self._health.metrics(),
            "time_unix": time.time(),
            "fatal": None if fatal is None else _summary(fatal),
            "errors/fatal": int(fatal is not None),
        }
        try:
            await asyncio.to_thread(self._store.append_jsonl, ROLLOUT_ERRORS, row)
        except (OSError, PerdureError) as error:
            _log.warning("rollout_errors_not_written", error=str(error))

    async def aclose(self) -> None:
        """Append the last row; reports end."""
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
        abandoned = isinstance(error, StaleFence)
        retryable = isinstance(error, PerdureError) and error.retryable
        if isinstance(error, Exception) and not abandoned and not retryable:
            await self.report(fatal=error)


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:FATAL_CHARS]}"
