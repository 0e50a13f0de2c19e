"""The group attempts that run: how many, how far they are, and how they are ended."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from models.errors import ServiceUnreachable
from models.prompt import PromptDraw
from models.sample import SampleGroup

JOIN_S = 30.0
"""For cancelled attempts to end."""
ABORT_JOIN_S = 180.0
"""For attempts that did not, once every engine was told to abort its requests."""

Start = Callable[[PromptDraw, Callable[[], None]], Coroutine[Any, Any, SampleGroup]]
"""Begins an attempt of a draw; the callable is to be called as each sample is scored."""

_log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class EndedAttempt:
    """An attempt that returned, failed or was cancelled."""

    draw: PromptDraw
    task: asyncio.Task[SampleGroup]


@dataclass(eq=False, slots=True)
class _Attempt:
    draw: PromptDraw
    unfinished: int
    """Samples that are not scored yet."""


class InFlight:
    """Runs attempts of ``samples_per_prompt`` samples; ``on_change`` hears of every step."""

    def __init__(
        self, start: Start, samples_per_prompt: int, on_change: Callable[[], None]
    ) -> None:
        self._start = start
        self._samples_per_prompt = samples_per_prompt
        self._on_change = on_change
        self._running: dict[asyncio.Task[SampleGroup], _Attempt] = {}
        self._ended: list[EndedAttempt] = []
        self._unfinished = 0

    @property
    def groups(self) -> int:
        """Attempts that run."""
        return len(self._running)

    @property
    def unfinished_samples(self) -> int:
        """Samples of running attempts that are not scored yet."""
        return self._unfinished

    @property
    def scored_samples(self) -> int:
        """Samples of running attempts that are scored."""
        return len(self._running) * self._samples_per_prompt - self._unfinished

    def submit(self, draw: PromptDraw) -> None:
        """Begin an attempt of ``draw``."""
        attempt = _Attempt(draw, self._samples_per_prompt)
        task = asyncio.ensure_future(self._start(draw, partial(self._on_sample, attempt)))
        self._running[task] = attempt
        self._unfinished += attempt.unfinished
        task.add_done_callback(self._on_end)

    def take_ended(self) -> list[EndedAttempt]:
        """Attempts that ended since the last call, in hand-out order."""
        ended, self._ended = self._ended, []
        return sorted(ended, key=lambda each: each.draw.group_index)

    def cancel(self) -> None:
        """Ask every attempt to end; ``join`` waits for it. Asked again, it does nothing.

        A second cancellation would interrupt an attempt that is joining its siblings.
        """
        for task in self._running:
            if not task.cancelling():
                task.cancel()

    async def join(self, abort_all: Callable[[], Awaitable[None]]) -> None:
        """Return when every cancelled attempt has ended.

        Raises:
            ServiceUnreachable: some do not, although ``abort_all`` ended the engines' requests.
        """
        if self._running:
            await asyncio.wait(tuple(self._running), timeout=JOIN_S)
        if not self._running:
            return
        _log.warning("attempts_do_not_end", groups=len(self._running), waited_s=JOIN_S)
        await abort_all()
        await asyncio.wait(tuple(self._running), timeout=ABORT_JOIN_S)
        if self._running:
            raise ServiceUnreachable(
                f"{len(self._running)} cancelled group attempts still run after "
                f"{JOIN_S + ABORT_JOIN_S:g} s, the engines' requests aborted"
            )

    def _on_sample(self, attempt: _Attempt) -> None:
        attempt.unfinished -= 1
        self._unfinished -= 1
        self._on_change()

    def _on_end(self, task: asyncio.Task[SampleGroup]) -> None:
        attempt = self._running.pop(task)
        self._unfinished -= attempt.unfinished
        self._ended.append(EndedAttempt(attempt.draw, task))
        self._on_change()
