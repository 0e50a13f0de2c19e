"""The engines of a run: spawn, list, heal, and tell of deaths as they happen."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import structlog

from activities.wire.client import EngineClient
from models.errors import ActorLost, ContractViolation, EngineLost, ServiceUnreachable
from models.ports import EngineHandle
from models.publication import WeightsRef
from workers.actors.engine import EngineActor
from workers.actors.order import ActorFacts, actor_name
from workers.fleet.placement import in_bundle, place
from workers.fleet.run_fleet import RunFleet

START_MARGIN_S = 30.0
"""Added to the server's own start deadline when waiting for its actor's answer."""
RETURN_POLL_S = 1.0
"""A dead engine that another worker replaces is noticed again within this time."""

_log = structlog.get_logger(__name__)


class Engines:
    """All engines of one run."""

    def __init__(
        self, fleet: RunFleet, connect: Callable[[str], EngineClient] = EngineClient
    ) -> None:
        self._fleet = fleet
        self._connect = connect
        self._clients: dict[str, EngineClient] = {}
        self._confirmed: dict[str, int] = {}
        self._exits: dict[str, asyncio.Task[None]] = {}
        self._spawned = asyncio.Condition()

    async def live(self) -> tuple[EngineHandle, ...]:
        """Engines whose actor and server live, in rank order."""
        found = await self._all_facts()
        return tuple(_handle(facts) for facts in found.values() if facts is not None)

    async def ensure(self) -> tuple[EngineHandle, ...]:
        """Start every engine that is dead or foreign; return those that were started.

        Raises:
            EngineLost: a server did not start; the message holds the end of its log.
        """
        found = await self._all_facts()
        dead = [rank for rank, facts in found.items() if facts is None]
        if not dead:
            return ()
        spec = await self._fleet.spec()
        group = await place(
            self._fleet.cluster,
            self._fleet.run.run_id,
            "engines",
            spec.inference.num_engines,
            await self._fleet.startup_timeout_s(),
        )
        started = await together(self._spawn(rank, in_bundle(group, rank)) for rank in dead)
        async with self._spawned:
            self._spawned.notify_all()
        return tuple(started)

    async def stale(self, weights: WeightsRef) -> tuple[EngineHandle, ...]:
        """Live engines that do not say that they serve the version of ``weights``."""
        handles = await self.live()
        versions = await asyncio.gather(*(self._version(each, weights) for each in handles))
        return tuple(
            handle
            for handle, version in zip(handles, versions, strict=True)
            if version != weights.version
        )

    @asynccontextmanager
    async def deaths(self) -> AsyncIterator[AsyncIterator[str]]:
        """Names of engines as they die while the context is open, those dead before it first."""
        spec = await self._fleet.spec()
        queue: asyncio.Queue[str] = asyncio.Queue()
        watchers = [
            asyncio.create_task(self._watch(rank, queue))
            for rank in range(spec.inference.num_engines)
        ]
        try:
            yield _drain(queue, watchers)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def close(self) -> None:
        """Forget caches and connections; engines go on."""
        for task in self._exits.values():
            task.cancel()
        await asyncio.gather(*self._exits.values(), return_exceptions=True)
        self._exits.clear()
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()

    async def _all_facts(self) -> dict[int, ActorFacts | None]:
        """Rank -> facts of an engine that serves and belongs to the run, None of any other."""
        spec = await self._fleet.spec()
        ranks = range(spec.inference.num_engines)
        answers = await asyncio.gather(*(self._fleet.facts("engine", rank) for rank in ranks))
        return {
            rank: facts if facts is not None and self._fleet.belongs(facts) else None
            for rank, facts in zip(ranks, answers, strict=True)
        }

    async def _spawn(self, rank: int, options: dict[str, Any]) -> EngineHandle:
        spec = await self._fleet.spec()
        actor = await self._fleet.create("engine", rank, EngineActor, options)
        timeout_s = spec.inference.start_timeout_s + START_MARGIN_S
        facts: ActorFacts = await actor.call("start", timeout_s=timeout_s)
        await self._fleet.remember(facts.status)
        _log.info("engine started", engine=actor.name, url=facts.status.url)
        return _handle(facts)

    async def _version(self, engine: EngineHandle, weights: WeightsRef) -> int | None:
        """Version that an engine serves; asked once for each, since versions only grow."""
        key = f"{engine.name}.{engine.incarnation}"
        if self._confirmed.get(key) == weights.version:
            return weights.version
        if engine.url not in self._clients:
            self._clients[engine.url] = self._connect(engine.url)
        try:
            info = await self._clients[engine.url].model_info()
        except (ServiceUnreachable, ContractViolation):
            return None
        text = str(info.get("weight_version", ""))
        version = int(text) if text.isdecimal() else None
        if version == weights.version:
            self._confirmed[key] = version
        return version

    async def _watch(self, rank: int, queue: asyncio.Queue[str]) -> None:
        """Put the engine's name into ``queue`` at each of its deaths."""
        name = actor_name("engine", rank)
        while True:
            if await self._fleet.facts("engine", rank) is not None:
                with contextlib.suppress(ActorLost):
                    await self._exit_of(rank)
            await queue.put(name)
            await self._returned(rank)

    async def _exit_of(self, rank: int) -> None:
        """Return when the actor of ``rank`` or its server has ended: one waiting call for all."""
        actor = self._fleet.actor("engine", rank)
        handle = await actor.handle()
        key = handle._actor_id.hex()
        if key not in self._exits:
            self._exits[key] = asyncio.create_task(self._wait_exit(rank))
            self._exits[key].add_done_callback(lambda _: self._exits.pop(key, None))
        await asyncio.shield(self._exits[key])

    async def _wait_exit(self, rank: int) -> None:
        actor = self._fleet.actor("engine", rank)
        with contextlib.suppress(ActorLost):
            await actor.call("wait_exit", timeout_s=None, follow=False)

    async def _returned(self, rank: int) -> None:
        """Return when the engine serves again; woken by a spawn here, else by looking."""
        while True:
            async with self._spawned:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._spawned.wait(), RETURN_POLL_S)
            facts = await self._fleet.facts("engine", rank)
            if facts is not None and self._fleet.belongs(facts):
                return


async def _drain(
    queue: asyncio.Queue[str], watchers: list[asyncio.Task[None]]
) -> AsyncIterator[str]:
    """Names from ``queue``; an error in a watcher ends the iteration with it."""
    while True:
        getting = asyncio.ensure_future(queue.get())
        try:
            await asyncio.wait({getting, *watchers}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not getting.done():
                getting.cancel()
        for watcher in watchers:
            if watcher.done():
                watcher.result()
        yield getting.result()


async def together(work: Iterable[Any]) -> list[Any]:
    """Results of concurrent coroutines; the first error ends the others and is raised as it is."""
    tasks = [asyncio.ensure_future(each) for each in work]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and (error := task.exception()) is not None:
                raise error
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _handle(facts: ActorFacts) -> EngineHandle:
    status = facts.status
    if status.url is None:
        raise EngineLost(f"{facts.order.name} of {facts.order.run.run_id} has no address")
    return EngineHandle(name=facts.order.name, url=status.url, incarnation=facts.order.incarnation)
