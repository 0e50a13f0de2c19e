"""The routing table as the router holds it: who sets it, which engines it makes usable.

Belongs to one event loop; nothing here awaits between a decision and its bookkeeping.
"""

import asyncio
import logging

from activities.wire.balance import least_reserved
from models.errors import ContractViolation, ServiceUnreachable, StaleFence
from models.ids import FenceToken
from models.routing import EngineState, RoutedEngine, RoutedEngineStatus, RoutingTable
from workers.engines.router.groups import Groups
from workers.engines.router.target import Group, Target
from workers.engines.router.upstream import Upstream

WARN_EVERY_S = 30.0
"""A drain says so this often."""

logger = logging.getLogger(__name__)


class Table:
    """Engines by name, and the prompt groups that they were given. Empty at first."""

    def __init__(self, groups: Groups, token: str | None = None) -> None:
        """``token``: what engines ask for, if they do."""
        self.groups = groups
        self._token = token
        self.is_set = False
        """Whether a table was ever received."""
        self._targets: dict[str, Target] = {}
        self._committed: frozenset[tuple[int, str]] = frozenset()
        self._owner: FenceToken | None = None
        self._changed = asyncio.Event()

    @property
    def targets(self) -> tuple[Target, ...]:
        """Every engine, those that were given up included."""
        return tuple(self._targets.values())

    @property
    def changed(self) -> asyncio.Event:
        """Set, and replaced, when an engine may have become usable or a wait may be in vain."""
        return self._changed

    @property
    def has_hope(self) -> bool:
        """Whether an engine is known that may become usable again."""
        return any(each.state is not EngineState.UNAVAILABLE for each in self._targets.values())

    def status(self) -> tuple[RoutedEngineStatus, ...]:
        """Every engine as the router sees it."""
        return tuple(target.status(self._committed) for target in self._targets.values())

    def set(self, token: FenceToken, table: RoutingTable) -> None:
        """Route by ``table``; calls to engines that are not in it any more end as transport faults.

        A process that was given up stays so; one of another incarnation or address is new.

        Raises:
            StaleFence: a larger token has called.
            ConfigurationError: an address that is no ``http://host:port``.
        """
        self._admit(token)
        before, self._targets = (
            self._targets,
            {each.name: self._kept(each) for each in table.engines},
        )
        self._committed = frozenset(table.committed)
        self.is_set = True
        for target in before.values():
            if self._targets.get(target.engine.name) is not target:
                self._end(target)
        for target in self._targets.values():
            if target.state is EngineState.UNAVAILABLE:
                self._end(target)
        self.wake()

    async def drain(self, token: FenceToken, name: str, timeout_s: float) -> None:
        """Give engine ``name`` no new group and return when it owes nothing.

        Raises:
            StaleFence: a larger token has called.
            ContractViolation: no engine has the name.
            ServiceUnreachable: it still owes something after ``timeout_s`` seconds.
        """
        self._admit(token)
        target = self._targets.get(name)
        if target is None:
            known = ", ".join(self._targets) or "none"
            raise ContractViolation(f"no engine {name!r} to drain; the table has: {known}")
        if target.state is EngineState.SERVING:
            target.state = EngineState.DRAINING
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while not target.settled.is_set():
            left = deadline - clock()
            owes = f"{target.active} open calls and {target.groups} groups"
            if left <= 0:
                raise ServiceUnreachable(f"{name} still owes {owes} after {timeout_s:g} s")
            try:
                await asyncio.wait_for(target.settled.wait(), min(left, WARN_EVERY_S))
            except TimeoutError:
                logger.warning("%s drains: it owes %s", name, owes)
        if target.state is EngineState.UNAVAILABLE:
            raise ServiceUnreachable(f"{name} was given up before it owed nothing")

    def least_active(self, now: float) -> Target | None:
        """The engine for a new group or a call without one; None when none is routable."""
        routable = (
            target
            for target in self._targets.values()
            if target.state is EngineState.SERVING and target.holds(self._committed)
        )
        return least_reserved(routable, lambda target: target.load, now)

    def still_serves(self, group: Group) -> bool:
        """Whether the group's engine goes on with it: a draining one does."""
        target = group.target
        going = target.state in (EngineState.SERVING, EngineState.DRAINING)
        return going and target.holds(self._committed)

    def give_up(self, target: Target, reason: str) -> None:
        """Never use this process again; its open calls end as transport faults."""
        logger.error("%s is given up: %s", target.engine.name, reason)
        target.state = EngineState.UNAVAILABLE
        self._end(target)
        self.wake()

    def close(self) -> None:
        """End every open call as a transport fault."""
        for target in self._targets.values():
            self._end(target)

    def wake(self) -> None:
        """Let waiting calls look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _admit(self, token: FenceToken) -> None:
        """Refuse smaller tokens; a newer epoch begins with no group, its calls are of others."""
        owner = self._owner
        if owner is not None and token < owner:
            raise StaleFence(f"router: {token} refused, {owner} owns it")
        if owner is not None and token.epoch > owner.epoch:
            self.groups.clear()
        self._owner = token

    def _kept(self, engine: RoutedEngine) -> Target:
        """The target of this very process, or a new one."""
        target = self._targets.get(engine.name)
        if target is None or not target.is_life_of(engine):
            return Target(engine, Upstream(engine.url, self._token))
        target.register(engine)
        return target

    def _end(self, target: Target) -> None:
        target.upstream.close()
        self.groups.drop_of(target)
