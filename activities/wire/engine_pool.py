"""Which engine serves a prompt group: the least active one of the current set.

Siblings go to one engine, so that it computes their prompt once. In a fully async run the one
member of the pool is the router, which chooses for itself and is told what belongs together.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from activities.wire.balance import Load, least_reserved
from activities.wire.client import EngineClient
from activities.wire.contract import GenerateRequest, GenerateResponse
from activities.wire.faults import TRANSPORT
from activities.wire.router_contract import GroupTag
from models.errors import ContractViolation, GenerationFault, ServiceUnreachable
from models.sample import FinishReason

WARN_EVERY_S = 30.0
"""A wait for engines says so this often."""

_log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Engine:
    """A member of the pool: its client, what it owes, and whether it left the pool."""

    client: EngineClient
    load: Load = field(default_factory=Load)
    gone: bool = False
    calls: set[asyncio.Task[GenerateResponse]] = field(default_factory=set)
    unreleased: set[str] = field(default_factory=set)
    releasing: asyncio.Task[None] | None = None

    def is_gone(self) -> bool:
        """Whether it was removed from the pool."""
        return self.gone

    def release(self, group: str) -> None:
        """Tell the router in the background that ``group`` ended early; several go in one call."""
        self.unreleased.add(group)
        if not self.gone and (self.releasing is None or self.releasing.done()):
            self.releasing = asyncio.create_task(self._send_releases())

    async def close(self) -> None:
        """End every call as a transport fault. Nothing is released: this router is done with."""
        self.gone = True
        ending = [*self.calls, *filter(None, (self.releasing,))]
        for call in ending:
            call.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self.client.aclose()

    async def _send_releases(self) -> None:
        """What the router does not hear of goes with the next release, or it forgets it by age."""
        while self.unreleased:
            groups = tuple(self.unreleased)
            try:
                await self.client.release_groups(groups)
            except (ServiceUnreachable, ContractViolation) as error:
                _log.warning("groups not released", groups=len(groups), reason=error.message)
                return
            self.unreleased.difference_update(groups)


class Route:
    """One group's engine. Made by ``EnginePool.reserve``."""

    def __init__(
        self, engine: _Engine, clock: Callable[[], float], num_calls: int, routed: bool
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._group = uuid.uuid4().hex if routed else None
        self._sent = False
        self._answered = 0
        self._expected = num_calls

    @property
    def url(self) -> str:
        """Address of the engine."""
        return self._engine.client.url

    async def generate(self, request: GenerateRequest, *, timeout_s: float) -> GenerateResponse:
        """``EngineClient.generate``; a call to an engine that is removed fails as transport."""
        engine = self._engine
        if engine.is_gone():
            raise self._lost(request.rid)
        call = asyncio.ensure_future(self._call(request, timeout_s))
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
                engine.load.avoid(self._clock())
            raise
        finally:
            engine.calls.discard(call)

    def close(self) -> None:
        """The group ends here. A router that still expects calls of it is told."""
        if self._group is not None and self._sent and self._answered != self._expected:
            self._engine.release(self._group)

    async def _call(self, request: GenerateRequest, timeout_s: float) -> GenerateResponse:
        client = self._engine.client
        if self._group is None:
            return await client.generate(request, timeout_s=timeout_s)
        tag = GroupTag(self._group, self._answered, self._expected)
        self._sent = True
        answer = await client.generate(request, timeout_s=timeout_s, group=tag)
        self._answered += 1
        if answer.meta_info.finish_reason.get("type") == FinishReason.ABORT:
            # Handed back: what is left of it is another call, or else the group fails.
            self._expected += 1
        return answer

    def _lost(self, rid: str) -> GenerationFault:
        return GenerationFault(f"{self.url}: removed while request {rid} ran", TRANSPORT)


class EnginePool:
    """The current engines of a run.

    ``connect`` makes a client for an address, told the limits of the model that is served there.
    ``routed``: the members are routers, which are told the prompt group of every call.
    """

    def __init__(
        self,
        connect: Callable[[str], EngineClient],
        clock: Callable[[], float] = time.monotonic,
        *,
        routed: bool = False,
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._routed = routed
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
            engine.load.avoid_until = 0.0
        if kept:
            self._ready.set()
        else:
            self._ready.clear()
        await asyncio.gather(*(engine.close() for engine in removed))

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
        engine = least_reserved(
            self._engines.values(), lambda candidate: candidate.load, self._clock()
        )
        assert engine is not None  # nothing was awaited since it was ready
        engine.load.reserved += num_calls
        route = Route(engine, self._clock, num_calls, self._routed)
        try:
            yield route
        finally:
            engine.load.reserved -= num_calls
            route.close()

    async def abort_all(self) -> None:
        """Ask every engine to end all its requests. An engine that does not answer is logged."""
        await asyncio.gather(*(_abort(engine.client) for engine in self._engines.values()))

    async def aclose(self) -> None:
        """Drop every engine."""
        await self.set_engines(())


async def _abort(client: EngineClient) -> None:
    try:
        await client.abort_all()
    except (ServiceUnreachable, ContractViolation) as error:
        _log.warning("requests not aborted", engine=client.url, reason=error.message)
