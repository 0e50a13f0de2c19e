"""One engine of the routing table, and the prompt groups that were given to it."""

import asyncio
from dataclasses import dataclass, field

from activities.wire.balance import Load
from models.routing import EngineState, RoutedEngine, RoutedEngineStatus
from workers.engines.router.upstream import Upstream


@dataclass(eq=False, slots=True)
class Target:
    """An engine as the router sees it.

    It owes calls while one is active or while a group that it was given has not ended.
    """

    engine: RoutedEngine
    upstream: Upstream
    load: Load = field(default_factory=Load)
    state: EngineState = EngineState.SERVING
    active: int = 0
    groups: int = 0
    failed_checks: int = 0
    wrong_weights: bool = False
    """It said that it serves another version than it is registered with."""
    check_at: float = 0.0
    """When its next health check is due, in seconds of the event loop's clock."""
    checking: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it owes nothing."""

    def __post_init__(self) -> None:
        self.state = self.engine.state
        self.settled.set()

    def is_life_of(self, engine: RoutedEngine) -> bool:
        """Whether ``engine`` is this very process."""
        mine = self.engine
        return (mine.incarnation, mine.url) == (engine.incarnation, engine.url)

    def register(self, engine: RoutedEngine) -> None:
        """Take over what a table says of this process. One that was given up stays so."""
        moved = (engine.version, engine.digest) != (self.engine.version, self.engine.digest)
        if moved or self.state is EngineState.UPDATING:
            self.wrong_weights = False
            self.failed_checks = 0
            self.check_at = 0.0
        self.engine = engine
        self.load.avoid_until = 0.0
        if self.state is not EngineState.UNAVAILABLE:
            self.state = engine.state

    @property
    def is_judged(self) -> bool:
        """Whether it should generate: not while it loads weights, and not the dead."""
        return self.state in (EngineState.SERVING, EngineState.DRAINING)

    def holds(self, committed: frozenset[tuple[int, str]]) -> bool:
        """Whether its weights are among the ``committed`` (version, digest) pairs."""
        return not self.wrong_weights and (self.engine.version, self.engine.digest) in committed

    def changed(self) -> None:
        """Something that it owes began or ended."""
        if self.active or self.groups:
            self.settled.clear()
        else:
            self.settled.set()

    def status(self, committed: frozenset[tuple[int, str]]) -> RoutedEngineStatus:
        """For ``GET /router/state``."""
        return RoutedEngineStatus(
            engine=self.engine.model_copy(update={"state": self.state}),
            routable=self.state is EngineState.SERVING and self.holds(committed),
            active_calls=self.active,
            reserved_calls=self.load.reserved,
            failed_checks=self.failed_checks,
        )


@dataclass(eq=False, slots=True)
class Group:
    """A prompt group on its engine. ``expected - answered`` calls are reserved there."""

    key: str
    target: Target
    answered: int
    expected: int
    active: int = 0
    touched: float = 0.0
    """When its last call began or ended, in seconds of the event loop's clock."""

    @property
    def owed(self) -> int:
        """Calls that its sender still expects."""
        return max(0, self.expected - self.answered)
