"""Which engine serves a prompt group: the least active one of the current set.

Siblings go to one engine, so that it computes their prompt once.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from activities.wire.client import EngineClient
from activities.wire.contract import GenerateRequest, GenerateResponse
from activities.wire.faults import TRANSPORT
from models.errors import GenerationFault, ServiceUnreachable

WARN_EVERY_S = 30.0
"""A wait for engines says so this often."""

AVOID_AFTER_FAULT_S = 2.0
"""An engine whose connection just broke is chosen last for this long: a dead one answers
fastest and is always the least active, so it would draw every group."""

_log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Engine:
    """A member of the pool: its client, how many calls it owes, and whether it left the pool."""

    client: EngineClient
    reserved: int = 0
    avoid_until: float = 0.0
    gone: bool = False
    calls: set[asyncio.Task[GenerateResponse]] = field(default_factory=set)

    def is_gone(self) -> bool:
        """Whether it was removed from the pool."""
        return self.gone


class Route:
    """One group's engine. Made by ``EnginePool.reserve``."""

    def __init__(self, engine: _Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock

    @property
    def url(self) -> str:
        """Address of the engine."""
        return self._engine.client.url

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> GenerateResponse:
        """``EngineClient.generate``; a call to an engine that is removed fails as transport."""
        engine = self._engine
        if engine.is_gone():
            raise self._lost(request.rid)
        call = asyncio.ensure_future(engine.client.generate(request, timeout_s=timeout_s))
        engine.calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if engine.is_gone() and task is not None and not task.cancelling():
                raise self._lost(request.rid) from None
            raise
        except GenerationFault as fault:
            if fault.category == TRANSPORT:
                engine.avoid_until = self._clock() + AVOID_AFTER_FAULT_S
            raise
        finally:
            engine.calls.discard(call)

    def _lost(self, rid: str) -> GenerationFault:
        return GenerationFault(f"{self.url}: removed while request {rid} ran", TRANSPORT)


class EnginePool:
    """The current engines of a run. ``connect`` makes a client for an address."""

    def __init__(
        self,
        connect: Callable[[str], EngineClient] = EngineClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._engines: dict[str, _Engine] = {}
        self._ready = asyncio.Event()

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the current engines."""
        return tuple(self._engines)

    async def set_engines(self, urls: Sequence[str]) -> None:
        """Route to exactly ``urls``; live calls to other engines fail as transport faults."""
        before = self._engines
        kept = {url: before.get(url) or _Engine(self._connect(url)) for url in urls}
        removed = [engine for url, engine in before.items() if url not in kept]
        self._engines = kept
        for engine in kept.values():
            engine.avoid_until = 0.0
        if kept:
            self._ready.set()
        else:
            self._ready.clear()
        for engine in removed:
            engine.gone = True
            for call in tuple(engine.calls):
                call.cancel()
        for engine in removed:
            await asyncio.gather(*engine.calls, return_exceptions=True)
            await engine.client.aclose()

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once there is an engine; warn while waiting.

        Raises:
            ServiceUnreachable: there was none for ``timeout_s`` seconds.
        """
        deadline = self._clock() + timeout_s
        while not self._ready.is_set():
            left = deadline - self._clock()
            if left <= 0:
                raise ServiceUnreachable(f"no engine to route to for {timeout_s:g} s")
            try:
                await asyncio.wait_for(self._ready.wait(), min(left, WARN_EVERY_S))
            except TimeoutError:
                _log.warning("waiting_for_engines", seconds_left=round(left, 1))

    @asynccontextmanager
    async def reserve(self, num_calls: int, *, timeout_s: float) -> AsyncIterator[Route]:
        """Choose the least active engine for ``num_calls`` calls; waits while there is none."""
        await self.wait_ready(timeout_s)
        now = self._clock()
        engine = min(
            self._engines.values(), key=lambda each: (each.avoid_until > now, each.reserved)
        )
        engine.reserved += num_calls
        try:
            yield Route(engine, self._clock)
        finally:
            engine.reserved -= num_calls

    async def aclose(self) -> None:
        """Drop every engine."""
        await self.set_engines(())
