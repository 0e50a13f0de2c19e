"""A pause of SGLang's front that is answered as soon as the requests that it ends have ended.

SGLang 0.5.18 asks its scheduler to end them, looks at once whether they have, and when one has not,
which is always so, sleeps for a second before it looks again: engines would stand still for longer
than most publications take. Here the same is looked at more often. Runs in the process of the HTTP
server.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

LOOKS_AGAIN_S = 1.0
"""After so long SGLang's own loop goes on, which tells the scheduler once more."""
_LOOK_S = 0.005
"""SGLang has no event for it. Waiting for its lock as a writer would hold up who comes next."""

Pause = Callable[[Any, Any], Awaitable[None]]
"""``TokenizerManager.pause_generation``."""


def prompt_pause(pause: Pause) -> Pause:
    """``pause`` that finds no request left in mode ``abort``, where they end within a second."""

    @wraps(pause)
    async def paused(manager: Any, order: Any) -> None:
        if order.mode == "abort":
            await _end_requests(manager)
        await pause(manager, order)

    return paused


async def _end_requests(manager: Any) -> None:
    """Let no request begin, and wait for the end of those that have."""
    async with manager.is_pause_cond:
        manager.is_pause = True
    manager.abort_request(abort_all=True)
    deadline = time.monotonic() + LOOKS_AGAIN_S
    # Every request holds it from its start to the last byte of its answer.
    while await manager.model_update_lock.is_locked() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)
