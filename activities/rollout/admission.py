"""The admission gate: how many generation calls run at once, and whether new ones may start."""

import asyncio
from collections import deque
from typing import Any

from models.errors import ServiceUnreachable


class AdmissionGate:
    """A fair semaphore that can be closed. A permit covers generation only, never scoring.

    Closing wins against a permit that was just handed over: the waiter gives it back and keeps its
    place at the head of the line. A gate that was aborted stays closed for ever.
    """

    def __init__(self, permits: int) -> None:
        self._permits = permits
        self._active = 0
        self._open = True
        self._aborted = False
        self._users: set[asyncio.Task[Any]] = set()  # live tasks that ever asked for a permit
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
    def is_open(self) -> bool:
        """Whether new calls are admitted."""
        return self._open

    @property
    def permits(self) -> int:
        """Most calls at once."""
        return self._permits

    async def acquire(self) -> None:
        """Take a permit, first come first served; waits while the gate is closed or full.

        Raises:
            asyncio.CancelledError: the gate was aborted.
        """
        if self._aborted:
            raise asyncio.CancelledError("the admission gate was aborted")
        self._remember(asyncio.current_task())
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
        """Open the gate.

        Raises:
            RuntimeError: it was aborted.
        """
        if self._aborted:
            raise RuntimeError("an aborted admission gate cannot open again")
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

    async def abort(self, timeout_s: float) -> None:
        """Close for ever; cancel and join every task that waits or ever took a permit.

        That includes tasks whose generation is over and that are being scored.

        Raises:
            ServiceUnreachable: a task still runs after ``timeout_s`` seconds.
        """
        self._aborted, self._open = True, False
        for waiter in self._waiters:
            waiter.cancel()
        self._waiters.clear()
        users = self._users - {asyncio.current_task()}
        for task in users:
            task.cancel()
        if not users:
            return
        _, left = await asyncio.wait(users, timeout=timeout_s)
        if left:
            raise ServiceUnreachable(f"{len(left)} cancelled calls still run after {timeout_s:g} s")

    def _remember(self, task: asyncio.Task[Any] | None) -> None:
        if task is not None and task not in self._users:
            self._users.add(task)
            task.add_done_callback(self._users.discard)

    def _hand_over(self) -> None:
        while self._open and self._waiters and self._active < self._permits:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._active += 1
                waiter.set_result(None)
