"""When an engine counts as hung: one rule for all who look at engines from outside.

A look asks ``/health``, which makes the engine generate a token. The processes of an SGLang server
may live, answer every other call and generate nothing, when the one that turns tokens into answers
is gone: requests then hang until their senders' deadlines, and ``/health`` alone tells. It says no
20 s into a pause as well, so a paused engine is asked for ``/server_info``, which proves less.
"""

import asyncio
from collections.abc import Collection, Hashable
from typing import Protocol

INTERVAL_S = 5.0
"""From one look at an engine to the next."""
TIMEOUT_S = 5.0
"""For the answer. SGLang never answers in less than one second."""
FAILURES = 3
"""Looks in a row without a good answer. One may meet a long batch."""


class FailedLooks:
    """Failed looks in a row, by engine process."""

    def __init__(self, limit: int = FAILURES) -> None:
        self._limit = limit
        self._failed: dict[Hashable, int] = {}

    def note(self, engine: Hashable, healthy: bool) -> bool:
        """Count a look; whether the engine has failed as many in a row as make it hung."""
        if healthy:
            self._failed.pop(engine, None)
            return False
        self._failed[engine] = self._failed.get(engine, 0) + 1
        return self._failed[engine] >= self._limit

    def keep(self, engines: Collection[Hashable]) -> None:
        """Forget all engines but these."""
        self._failed = {each: count for each, count in self._failed.items() if each in engines}


class LookedAt(Protocol):
    """A client of one engine."""

    async def health(self, *, timeout_s: float) -> bool:
        """Whether it generates."""
        ...


async def until_hung(engine: LookedAt, timeout_s: float = TIMEOUT_S) -> None:
    """Look at ``engine`` again and again; return when it hangs. It must not be paused."""
    looks = FailedLooks()
    while True:
        await asyncio.sleep(INTERVAL_S)
        if looks.note("this one", await engine.health(timeout_s=timeout_s)):
            return
