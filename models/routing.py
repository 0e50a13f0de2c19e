"""The router of a fully async run: which engines may be given requests, and what it tells."""

from enum import StrEnum

from models.base import Frozen


class EngineState(StrEnum):
    """What the router does with an engine. Only ``serving`` ones are given new groups."""

    SERVING = "serving"
    DRAINING = "draining"
    """Calls that it was given go on; no new group."""
    UPDATING = "updating"
    UNAVAILABLE = "unavailable"
    """Failed its health checks or an update. Never served again: it must be replaced."""


class RoutedEngine(Frozen):
    """One engine with the weights that it was confirmed to hold."""

    name: str
    url: str
    incarnation: int
    version: int
    digest: str
    state: EngineState = EngineState.SERVING


class RoutingTable(Frozen):
    """The engines to route to, and the weights that an engine must hold to be given requests.

    ``committed`` holds (version, digest) pairs: the published one, and during a rolling
    publication the next one as well. An engine with any other pair is known and not routable.
    """

    engines: tuple[RoutedEngine, ...] = ()
    committed: tuple[tuple[int, str], ...] = ()


class RoutedEngineStatus(Frozen):
    """An engine as the router sees it."""

    engine: RoutedEngine
    routable: bool
    active_calls: int
    """Calls sent to it and not answered."""
    reserved_calls: int
    """Calls of the groups that it was given, those not sent yet included."""
    failed_checks: int
    """Health checks in a row without a good answer."""


class RouterState(Frozen):
    """Answer of the router about itself."""

    engines: tuple[RoutedEngineStatus, ...]
    active_calls: int
    waiting_calls: int
    """Calls that wait for a routable engine."""
