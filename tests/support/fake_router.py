"""A router in memory: keeps the table it is given, fenced by token, and logs what it is asked."""

from dataclasses import dataclass, field

from models.errors import ServiceUnreachable, StaleFence
from models.ids import FenceToken
from models.ports import RouterHandle
from models.routing import EngineState, RoutedEngineStatus, RouterState, RoutingTable
from tests.support.fake_engines import Script


@dataclass
class FakeRouter:
    """One router process's state."""

    url: str = "http://router.0"
    incarnation: int = 0
    alive: bool = True
    deaf: bool = False
    """It lives and answers nothing."""
    table: RoutingTable = field(default_factory=RoutingTable)
    tables: list[RoutingTable] = field(default_factory=list)
    """Every table that it was given, oldest first."""
    owner: FenceToken | None = None
    unavailable: set[tuple[str, int]] = field(default_factory=set)
    """(name, incarnation) of engines that failed their health checks."""

    @property
    def handle(self) -> RouterHandle:
        return RouterHandle(url=self.url, incarnation=self.incarnation)

    def routable(self) -> list[str]:
        """Names of the engines that may be given requests now."""
        return [each.engine.name for each in self.statuses() if each.routable]

    def statuses(self) -> tuple[RoutedEngineStatus, ...]:
        """Every engine of the table as the router sees it."""
        return tuple(self._status(name) for name in (each.name for each in self.table.engines))

    def _status(self, name: str) -> RoutedEngineStatus:
        engine = next(each for each in self.table.engines if each.name == name)
        if (engine.name, engine.incarnation) in self.unavailable:
            engine = engine.model_copy(update={"state": EngineState.UNAVAILABLE})
        routable = (
            engine.state is EngineState.SERVING
            and (engine.version, engine.digest) in self.table.committed
        )
        return RoutedEngineStatus(
            engine=engine, routable=routable, active_calls=0, reserved_calls=0, failed_checks=0
        )


class FakeRouterClient:
    """``activities.site.RouterControl`` on a ``FakeRouter``."""

    def __init__(self, router: FakeRouter, script: Script) -> None:
        self.router, self.script = router, script

    def _answer(self, token: FenceToken | None = None) -> None:
        if not self.router.alive or self.router.deaf:
            raise ServiceUnreachable(f"{self.router.url}: connection refused or no answer")
        if token is None:
            return
        owner = self.router.owner
        if owner is not None and token < owner:
            raise StaleFence(f"router: {token} refused, {owner} owns it")
        self.router.owner = token

    async def set_table(self, token: FenceToken, table: RoutingTable) -> None:
        self._answer(token)
        versions = ",".join(str(version) for version, _ in table.committed)
        await self.script.play(f"table {versions}")
        self._answer(token)
        self.router.table = table
        self.router.tables.append(table)

    async def drain(self, token: FenceToken, engine: str, timeout_s: float) -> None:
        self._answer(token)
        engines = tuple(
            each.model_copy(update={"state": EngineState.DRAINING}) if each.name == engine else each
            for each in self.router.table.engines
        )
        self.router.table = self.router.table.model_copy(update={"engines": engines})
        await self.script.play(f"drain {engine}")
        self._answer(token)

    async def state(self) -> RouterState:
        self._answer()
        return RouterState(engines=self.router.statuses(), active_calls=0, waiting_calls=0)

    async def aclose(self) -> None:
        return None
