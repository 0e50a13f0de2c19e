"""The one helper for long calls: beat, report progress, notice a stall, end cleanly.

It goes around the whole of an activity, rows and reports included: whatever stays outside has one
heartbeat time-out in all, and a slow disk would look like a dead worker.

The call runs as a task of its own, so a slow answer to a progress question never delays a beat by
more than a quarter of the heartbeat time-out. Beating on liveness alone would hide a call that
hangs for ever; progress that does not move for ``stall_s`` ends it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import structlog
from temporalio import activity

from models.errors import ActorLost, PerdureError, ServiceUnreachable
from models.ports import StageProgress

STALL_S = 1800.0
"""Longest time without any progress; above every single step that a back end reports."""

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
    stalled: type[PerdureError] = ServiceUnreachable,
) -> T:
    """Await ``call`` while heartbeating a ``StageProgress``.

    Args:
        call: the work; cancelled and joined when the activity is cancelled.
        stage: name in the heartbeat until the first progress arrives.
        progress_of: what the call has done so far; without it a stall cannot be noticed.
        stall_s: seconds without a change of progress after which the call is given up.
        stalled: what a stall is raised as.

    Raises:
        PerdureError: whatever ``call`` raises, or ``stalled``.
        asyncio.CancelledError: the activity was cancelled; ``call`` has ended.
    """
    interval = _interval()
    work = asyncio.create_task(call, name=stage)
    seen, seen_at = StageProgress(stage=stage), time.monotonic()
    try:
        while not work.done():
            activity.heartbeat(seen)
            await asyncio.wait({work}, timeout=interval)
            if work.done() or progress_of is None:
                continue
            latest = await _ask(progress_of, seen, interval)
            if latest != seen:
                seen, seen_at = latest, time.monotonic()
            elif time.monotonic() - seen_at > stall_s:
                raise stalled(
                    f"{stage}: no progress for {stall_s:.0f} s at {seen.stage} "
                    f"{seen.done} of {seen.total} {seen.detail}".rstrip()
                )
        return work.result()
    finally:
        await _join(work, stage, interval)


def _interval() -> float:
    timeout = activity.info().heartbeat_timeout
    return timeout.total_seconds() / 4 if timeout else _UNLIMITED_BEAT_S


async def _ask(progress_of: ProgressOf, seen: StageProgress, timeout_s: float) -> StageProgress:
    """The newest progress; an unanswered question is not a failure of the call."""
    try:
        return await asyncio.wait_for(progress_of(), timeout_s)
    except (ActorLost, ServiceUnreachable, TimeoutError) as error:
        _log.debug("progress unknown", stage=seen.stage, reason=str(error))
        return seen


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
