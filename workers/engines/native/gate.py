"""The gate in front of the scheduler: closed by a pause, and by a weight update that waits.

Event loop only. A request counts as inside from ``enter`` to ``leave``. One that is aborted while
it is held hears of that when the gate opens, as with SGLang.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from activities.wire.contract import REQUEST_GATED
from workers.engines.native.answers import PayloadError


class Gate:
    """Holds new requests while generation is paused or weights are about to change."""

    def __init__(self) -> None:
        self.paused = False
        self.num_inside = 0
        self._updates = 0
        self._held: dict[str, asyncio.Future[None]] = {}
        self._aborted: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether a request may pass now."""
        return not self.paused and not self._updates

    @property
    def num_held(self) -> int:
        """Requests that wait in front of the gate."""
        return len(self._held)

    async def enter(self, rid: str) -> None:
        """Wait until open. Raises PayloadError 499 when the request was aborted meanwhile."""
        while not self.is_open:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._held[rid] = waiter
            try:
                await waiter
            finally:
                del self._held[rid]
                was_aborted = rid in self._aborted
                self._aborted.discard(rid)
            if was_aborted:
                raise PayloadError(REQUEST_GATED.format(rid=rid), 499)
        self.num_inside += 1

    def leave(self) -> None:
        """A request ended."""
        self.num_inside -= 1
        self._changed.set()

    def abort(self, rid: str | None) -> None:
        """Refuse held requests whose id starts with ``rid``, None: all, once the gate opens."""
        self._aborted |= {held for held in self._held if rid is None or held.startswith(rid)}

    def refuse_all(self) -> None:
        """Refuse every held request now: the gate will not open again."""
        self.abort(None)
        self._wake()

    def pause(self) -> None:
        """Close."""
        self.paused = True
        self._changed.set()

    def resume(self) -> None:
        """Open, unless an update still holds it."""
        self.paused = False
        self._release()

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """Hold new requests; wait for those inside unless paused, where nothing would end them."""
        self._updates += 1
        try:
            while self.num_inside and not self.paused:
                self._changed.clear()
                await self._changed.wait()
            yield
        finally:
            self._updates -= 1
            self._release()

    def _release(self) -> None:
        if self.is_open:
            self._wake()

    def _wake(self) -> None:
        for waiter in self._held.values():
            if not waiter.done():
                waiter.set_result(None)
