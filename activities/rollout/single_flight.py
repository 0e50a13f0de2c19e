"""One stage at a time: callers of the same stage join it, an older epoch gives way."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from activities.fencing import FenceGuard
from models.errors import StaleFence
from models.ids import FenceToken

_T = TypeVar("_T")
Key = tuple[int | str, ...]


@dataclass(eq=False, slots=True)
class _Flight(Generic[_T]):
    key: Key
    epoch: int
    task: asyncio.Task[_T]

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class SingleFlight(Generic[_T]):
    """Runs the stage ``name``; keeps the last result for a caller that lost its answer.

    The stage belongs to the epoch, not to the caller: a caller that is cancelled leaves it running
    for the next one to join.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._fence = FenceGuard(name)
        self._flight: _Flight[_T] | None = None
        self._closed = False

    async def run(
        self, token: FenceToken, key: Key, start: Callable[[], Coroutine[Any, Any, _T]]
    ) -> _T:
        """The result of stage ``key`` under ``token.epoch``: joined, remembered, or started.

        Another stage of this epoch is awaited first; one of an older epoch is ended.

        Raises:
            StaleFence: ``token`` is outranked, the stage was ended by a newer epoch, or the
                component has closed.
        """
        key = (token.epoch, *key)
        while True:
            self._fence.admit(token)
            if self._closed:
                raise StaleFence(f"{self._name} {key[1:]}: the component closed")
            flight = self._flight
            if flight is None or flight.failed or (flight.task.done() and flight.key != key):
                flight = _Flight(key, token.epoch, asyncio.ensure_future(start()))
                self._flight = flight
            if flight.key == key:
                return await self._join(flight)
            if flight.epoch < token.epoch:
                flight.task.cancel()
            await asyncio.wait({flight.task})

    def revoke(self, epoch: int) -> None:
        """End a stage of ``epoch`` or below and refuse its tokens from now on."""
        self._fence.revoke(epoch)
        if self._flight is not None and self._flight.epoch <= epoch:
            self._flight.task.cancel()

    async def aclose(self) -> None:
        """End the running stage and wait until it is gone; none starts any more."""
        self._closed = True
        if self._flight is not None and not self._flight.task.done():
            self._flight.task.cancel()
            await asyncio.wait({self._flight.task})

    async def _join(self, flight: _Flight[_T]) -> _T:
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if flight.task.cancelled() and caller is not None and not caller.cancelling():
                raise StaleFence(
                    f"{self._name} {flight.key[1:]} of epoch {flight.epoch} was ended: the epoch "
                    "was revoked, a newer one took over, or the component closed"
                ) from None
            raise
