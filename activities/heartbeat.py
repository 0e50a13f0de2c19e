"""The one helper for long calls: beat, report progress, notice a stall, end cleanly.

It goes around the whole of an activity, rows and reports included: whatever stays outside has one
heartbeat time-out in all, and a slow disk would look like a dead worker.

The call runs as a task of its own, so a slow answer to a progress question never delays a beat by
more than a quarter of the heartbeat time-out. Beating on liveness alone would hide a call that
hangs for ever; progress that does not move for ``stall_s`` ends it. Who works answers the question
beside the work, from memory: one that says nothing at all for ``silent_s`` hangs as a whole (its
process is stopped, its loop blocked), and that ends the call much sooner.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import structlog
from temporalio import activity

from activities.multiplier import infra_timeout_multiplier
from models.errors import ActorLost, PerdureError, ServiceUnreachable
from models.ports import StageProgress

STALL_S = 1800.0
"""Longest time without any progress; above every single step that a back end reports."""

SILENT_S = 120.0
"""Longest time without any answer, times the infrastructure multiplier. Four times what a call to
an actor waits on a machine whose cores are all busy."""

JOIN_TIMEOUT_S = 20.0
"""Longest wait for a cancelled call to end before it is left to itself."""

_UNLIMITED_BEAT_S = 5.0
"""Beat of a call without a heartbeat time-out, for the progress display."""

_log = structlog.get_logger(__name__)

T = TypeVar("T")
ProgressOf = Callable[[], Awaitable[StageProgress]]


async def beating(
    call: Coroutine[Any, Any, T],
    stage: str,
    progress_of: ProgressOf | None = None,
    *,
    stall_s: float = STALL_S,
    silent_s: float = SILENT_S,
    stalled: type[PerdureError] = ServiceUnreachable,
) -> T:
    """Await ``call`` while heartbeating a ``StageProgress``.

    Args:
        call: the work; cancelled and joined when the activity is cancelled.
        stage: name in the heartbeat until the first progress arrives.
        progress_of: what the call has done so far; without it a stall cannot be noticed.
        stall_s: seconds without a change of progress after which the call is given up.
        silent_s: seconds without an answer from ``progress_of`` after which it is given up, before
            the infrastructure multiplier.
        stalled: what a stall or a silence is raised as.

    Raises:
        PerdureError: whatever ``call`` raises, or ``stalled``.
        asyncio.CancelledError: the activity was cancelled; ``call`` has ended.
    """
    interval = _interval()
    work = asyncio.create_task(call, name=stage)
    questions = _Questions(progress_of, StageProgress(stage=stage))
    limits = _Limits(stage, stall_s, silent_s * infra_timeout_multiplier(), stalled)
    try:
        while not work.done():
            activity.heartbeat(questions.seen)
            await asyncio.wait({work}, timeout=interval)
            if work.done() or progress_of is None:
                continue
            await questions.ask(interval)
            if not work.done():
                limits.require(questions)
        return work.result()
    finally:
        questions.close()
        await _join(work, stage, interval)


class _Questions:
    """Asks for progress, one question at a time; one that is slow stays asked."""

    def __init__(self, progress_of: ProgressOf | None, seen: StageProgress) -> None:
        self._progress_of = progress_of
        self._asking: asyncio.Task[StageProgress] | None = None
        self.seen = seen
        self.moved_at = self.answered_at = time.monotonic()

    async def ask(self, timeout_s: float) -> None:
        """Take the answer if it comes in time; an unanswered question is no failure of the call."""
        assert self._progress_of is not None
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._one(self._progress_of))
        await asyncio.wait({self._asking}, timeout=timeout_s)
        if not self._asking.done():
            return
        asking, self._asking = self._asking, None
        try:
            latest = asking.result()
        except (ServiceUnreachable, TimeoutError) as error:
            _log.debug("progress unknown", stage=self.seen.stage, reason=str(error))
            return
        except ActorLost as error:  # the call itself says so, or waits for its replacement
            _log.debug("progress unknown", stage=self.seen.stage, reason=str(error))
            latest = self.seen
        self.answered_at = time.monotonic()
        if latest != self.seen:
            self.seen, self.moved_at = latest, self.answered_at

    def close(self) -> None:
        """Ask nothing more."""
        if self._asking is not None:
            self._asking.cancel()

    @staticmethod
    async def _one(progress_of: ProgressOf) -> StageProgress:
        return await progress_of()


class _Limits(NamedTuple):
    """How long a call may go without a sign of life. Seconds."""

    stage: str
    stall_s: float
    silent_s: float
    stalled: type[PerdureError]

    def require(self, questions: _Questions) -> None:
        """Raise ``stalled`` when a limit is passed."""
        now, seen = time.monotonic(), questions.seen
        if now - questions.answered_at > self.silent_s:
            raise self.stalled(
                f"{self.stage}: who works at it has not answered for {self.silent_s:.0f} s, last "
                f"heard of at {seen.stage} {seen.done} of {seen.total}"
            )
        if now - questions.moved_at > self.stall_s:
            raise self.stalled(
                f"{self.stage}: no progress for {self.stall_s:.0f} s at {seen.stage} "
                f"{seen.done} of {seen.total} {seen.detail}".rstrip()
            )


def _interval() -> float:
    timeout = activity.info().heartbeat_timeout
    return timeout.total_seconds() / 4 if timeout else _UNLIMITED_BEAT_S


async def _join(work: "asyncio.Task[T]", stage: str, interval: float) -> None:
    """End ``work`` if it still runs, and wait for that, beating: what is cancelled is joined."""
    if work.done():
        return
    work.cancel()
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while not work.done() and (left := deadline - time.monotonic()) > 0:
        activity.heartbeat(StageProgress(stage=stage, detail="ending"))
        await asyncio.wait({work}, timeout=min(interval, left))
    if not work.done():
        _log.warning("cancelled call did not end", stage=stage, waited_s=JOIN_TIMEOUT_S)
    elif not work.cancelled() and work.exception() is not None:
        _log.info("cancelled call failed", stage=stage, reason=str(work.exception()))
