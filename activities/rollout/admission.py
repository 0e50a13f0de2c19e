"""The admission gate: how many generation calls run at once, and whether new ones may start."""

import asyncio
from collections import deque

from models.errors import ServiceUnreachable


class AdmissionGate:
    """A fair semaphore that can be closed. A permit covers generation only, never scoring.

    Closing wins against a permit that was just handed over: the waiter gives it back and keeps its
    place at the head of the line.
    """

    def __init__(self, permits: int) -> None:
        self._permits = permits
        self._active = 0
        self._open = True
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._changed = asyncio.Event()

    @property
    def active(self) -> int:
        """Permits held."""
        return self._active

    @property
    def waiting(self) -> int:
        """Callers in line."""
        return len(self._waiters)

    @property
    def permits(self) -> int:
        """Most calls at once."""
        return self._permits

    async def acquire(self) -> None:
        """Take a permit, first come first served; waits while the gate is closed or full."""
        if self._open and not self._waiters and self._active < self._permits:
            self._active += 1
            return
        front = False
        while True:
            waiter = asyncio.get_running_loop().create_future()
            if front:
                self._waiters.appendleft(waiter)
            else:
                self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                elif waiter.done() and not waiter.cancelled():
                    self.release()
                raise
            if self._open:
                return
            self._active -= 1
            self._changed.set()
            front = True

    def release(self) -> None:
        """Give a permit back."""
        if self._active == 0:
            raise RuntimeError("release without a permit")
        self._active -= 1
        self._changed.set()
        self._hand_over()

    def pause(self) -> None:
        """Close the gate: admitted calls finish, nobody new is admitted."""
        self._open = False

    def resume(self) -> None:
        """Open the gate."""
        self._open = True
        self._hand_over()

    def resize(self, permits: int) -> None:
        """Change the limit; calls above a smaller one finish in peace."""
        self._permits = permits
        self._hand_over()

    async def wait_idle(self, timeout_s: float) -> None:
        """Return when no permit is held.

        Raises:
            ServiceUnreachable: calls still run after ``timeout_s`` seconds.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._active:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise ServiceUnreachable(
                f"{self._active} generation calls still run after {timeout_s:g} s"
            ) from error

    def _hand_over(self) -> None:
        while self._open and self._waiters and self._active < self._permits:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._active += 1
                waiter.set_result(None)
