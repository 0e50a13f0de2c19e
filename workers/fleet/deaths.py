"""Who of a run's servers ends, told as it happens."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from models.errors import ActorLost, ServiceUnreachable
from workers.actors.order import actor_name
from workers.fleet.run_fleet import RunFleet

RETURN_POLL_S = 1.0
"""A dead server that another worker replaces is noticed again within this time."""


class Deaths:
    """Watches the servers (engines, router) of one run: one waiting call each, for all listeners.

    Whoever starts a server calls ``started``.
    """

    def __init__(self, fleet: RunFleet) -> None:
        self._fleet = fleet
        self._exits: dict[str, asyncio.Task[None]] = {}
        self._started = asyncio.Condition()

    async def started(self) -> None:
        """A replacement serves: it is watched from now on."""
        async with self._started:
            self._started.notify_all()

    @asynccontextmanager
    async def told(self, servers: Sequence[tuple[str, int]]) -> AsyncIterator[AsyncIterator[str]]:
        """Names of ``servers`` (role, rank) as they die within the context, dead ones first."""
        queue: asyncio.Queue[str] = asyncio.Queue()
        watchers = [asyncio.create_task(self._watch(role, rank, queue)) for role, rank in servers]
        try:
            yield _drain(queue, watchers)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def close(self) -> None:
        """Stop waiting for exits; the servers go on."""
        for task in self._exits.values():
            task.cancel()
        await asyncio.gather(*self._exits.values(), return_exceptions=True)
        self._exits.clear()

    async def _watch(self, role: str, rank: int, queue: asyncio.Queue[str]) -> None:
        """Put the server's name into ``queue`` at each of its deaths."""
        while True:
            known = await self._is_awaited(role, rank)
            if known or await self._fleet.facts(role, rank) is not None:
                with contextlib.suppress(ActorLost):
                    await self._exit_of(role, rank)
            await queue.put(actor_name(role, rank))
            await self._returned(role, rank)

    async def _is_awaited(self, role: str, rank: int) -> bool:
        """Whether a call waits for this very actor's exit: then it lives, and need not be asked."""
        try:
            handle = await self._fleet.actor(role, rank).handle()
        except (ActorLost, ServiceUnreachable):
            return False
        return handle._actor_id.hex() in self._exits

    async def _exit_of(self, role: str, rank: int) -> None:
        """Return when the actor or its server has ended."""
        handle = await self._fleet.actor(role, rank).handle()
        key = handle._actor_id.hex()
        if key not in self._exits:
            self._exits[key] = asyncio.create_task(self._wait_exit(role, rank))
            self._exits[key].add_done_callback(lambda _: self._exits.pop(key, None))
        await asyncio.shield(self._exits[key])

    async def _wait_exit(self, role: str, rank: int) -> None:
        with contextlib.suppress(ActorLost):
            await self._fleet.actor(role, rank).call("wait_exit", timeout_s=None, follow=False)

    async def _returned(self, role: str, rank: int) -> None:
        """Return when the server serves again; woken by a start here, else by looking."""
        while True:
            async with self._started:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._started.wait(), RETURN_POLL_S)
            facts = await self._fleet.facts(role, rank)
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
