"""Group retry and the stop rule: known serving faults are retried, but not for ever."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from activities.wire.faults import CATEGORIES
from models.errors import (
    ContractViolation,
    GenerationFault,
    PerdureError,
    ServingFailureSustained,
)
from models.prompt import PromptDraw

WINDOW_S = 300
FAILURE_FRACTION = 0.5
RETRY_DELAY_S = 1.0
POLL_S = 0.5
"""Longest wait between two checks of the stop rule."""

Clock = Callable[[], float]
_T = TypeVar("_T")


class ServingHealth:
    """Counts group attempts and raises when half of them failed for five minutes.

    The window is a list of whole seconds, at most 300, each with its successes and failures. The
    timer starts when the failed share of the window reaches one half and is reset when it falls
    below, an empty window included. ``clock`` is monotonic, in seconds.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._buckets: deque[list[int]] = deque()  # [second, successes, failures]
        self._bad_since: float | None = None
        self._retry_after = -math.inf
        self._attempts = 0
        self._failures = dict.fromkeys(CATEGORIES, 0)

    def record(self, successes: int = 0, faults: Iterable[str] = ()) -> None:
        """Count finished group attempts: successes, and one category a failed attempt."""
        failed = 0
        for category in faults:
            if category not in self._failures:
                raise ContractViolation(f"{category!r} is no serving-fault category")
            self._failures[category] += 1
            failed += 1
        if successes + failed == 0:
            return
        now = self._clock()
        if failed:
            self._retry_after = now + RETRY_DELAY_S
        self._attempts += successes + failed
        second = math.floor(now)
        if self._buckets and self._buckets[-1][0] == second:
            self._buckets[-1][1] += successes
            self._buckets[-1][2] += failed
        else:
            self._buckets.append([second, successes, failed])

    def start_over(self) -> None:
        """Engines are others from now on: only what fails under them counts. Totals go on."""
        self._buckets.clear()
        self._bad_since = None
        self._retry_after = -math.inf

    @property
    def submission_delay_s(self) -> float:
        """Seconds until new groups may be submitted; running groups are not affected."""
        return max(0.0, self._retry_after - self._clock())

    @property
    def failures(self) -> dict[str, int]:
        """Failed group attempts since start, by category."""
        return dict(self._failures)

    def check(self) -> None:
        """Apply the stop rule; raises ``ServingFailureSustained``."""
        now = self._clock()
        ok, failed = self._window(now)
        if not failed or failed / (ok + failed) < FAILURE_FRACTION:
            self._bad_since = None
        elif self._bad_since is None:
            self._bad_since = now
        if self._bad_since is not None and now - self._bad_since >= WINDOW_S:
            raise ServingFailureSustained(
                f"{failed} of the last {ok + failed} group attempts failed, at least half for "
                f"{now - self._bad_since:.0f} s; since start by category: {self._failures}. "
                "Look at the engines' logs and checkpoints/rollout_errors.jsonl"
            )

    def metrics(self) -> dict[str, float]:
        """All ``errors/`` metrics but ``errors/fatal``."""
        now = self._clock()
        ok, failed = self._window(now)
        return {
            "errors/elapsed_seconds": now - self._started,
            "errors/completed_group_attempts": self._attempts,
            "errors/requeued_groups": sum(self._failures.values()),
            "errors/window_group_attempts": ok + failed,
            "errors/window_failed_groups": failed,
            "errors/failure_fraction_5m": failed / (ok + failed) if failed else 0.0,
            "errors/high_failure_seconds": 0.0
            if self._bad_since is None
            else now - self._bad_since,
            **{f"errors/{name}_groups": count for name, count in self._failures.items()},
        }

    def _window(self, now: float) -> tuple[int, int]:
        """Successes and failures of the last ``WINDOW_S`` whole seconds."""
        oldest = math.floor(now) - WINDOW_S
        while self._buckets and self._buckets[0][0] <= oldest:
            self._buckets.popleft()
        return sum(each[1] for each in self._buckets), sum(each[2] for each in self._buckets)


def fatal_error(error: BaseException, draw: PromptDraw) -> BaseException:
    """What an unknown error of a group attempt ends the run with.

    Errors of the tree stay themselves. Anything else (a defect, an HTTP error of a verifier's
    service) is a ``ContractViolation``: trying again would not help, and it must not be taken for
    a serving fault.
    """
    if isinstance(error, PerdureError):
        return error
    violation = ContractViolation(
        f"prompt group {draw.group_index}, sample {draw.prepared_sample_id}: "
        f"{type(error).__name__}: {error}"
    )
    violation.__cause__ = error
    return violation


async def join_siblings(attempts: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results in order; the first exception cancels the siblings, joins them, and is raised.

    When several fail at once, an unknown error is raised rather than a known fault: it must not
    hide behind a retry.
    """
    tasks = [asyncio.ensure_future(attempt) for attempt in attempts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [
            error
            for task in tasks
            if task.done() and not task.cancelled() and (error := task.exception())
        ]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, GenerationFault))
    return [task.result() for task in tasks]
