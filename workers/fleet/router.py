"""The router of a fully async run: found, or started."""

import structlog

from models.errors import EngineLost
from models.ports import RouterHandle
from workers.actors.order import ActorFacts
from workers.actors.router import RouterActor
from workers.fleet.deaths import Deaths
from workers.fleet.run_fleet import RunFleet

ROUTER_CPUS = 0.01
START_MARGIN_S = 30.0
"""Added to the server's own start deadline when waiting for its actor's answer."""

_log = structlog.get_logger(__name__)


class Router:
    """The one router of a run; a run that is not fully async has none."""

    def __init__(self, fleet: RunFleet, deaths: Deaths) -> None:
        self._fleet = fleet
        self._deaths = deaths

    async def wanted(self) -> bool:
        """Whether the run has a router."""
        return (await self._fleet.spec()).fully_async

    async def live(self) -> RouterHandle | None:
        """The router that serves; None when the run has none.

        Raises:
            EngineLost: the run should have one and it is dead.
        """
        if not await self.wanted():
            return None
        facts = await self._facts()
        if facts is None:
            raise EngineLost(f"the router of {self._fleet.run.run_id} is not running")
        return _handle(facts)

    async def ensure(self) -> RouterHandle | None:
        """Start the router when the run wants one and it is dead; return it when it was started.

        Raises:
            EngineLost: it did not start; the message holds the end of its log.
        """
        if not await self.wanted() or await self._facts() is not None:
            return None
        spec = await self._fleet.spec()
        actor = await self._fleet.create("router", 0, RouterActor, {"num_cpus": ROUTER_CPUS})
        timeout_s = self._fleet.scaled(spec.inference.start_timeout_s) + START_MARGIN_S
        facts: ActorFacts = await actor.call("start", timeout_s=timeout_s)
        await self._fleet.remember(facts.status)
        await self._deaths.started()
        _log.info("router started", run=self._fleet.run.run_id, url=facts.status.url)
        return _handle(facts)

    async def _facts(self) -> ActorFacts | None:
        facts = await self._fleet.facts("router")
        return facts if facts is not None and self._fleet.belongs(facts) else None


def _handle(facts: ActorFacts) -> RouterHandle:
    url = facts.status.url
    if url is None:
        raise EngineLost(f"the router of {facts.order.run.run_id} has no address")
    return RouterHandle(url=url, incarnation=facts.order.incarnation)
