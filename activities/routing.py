"""Who may be given requests: the router's table, and the address that the producer sends to.

A fully async run has a router; it routes to engines that hold the weights its table commits. Any
other run is routed by the producer itself, engine by engine.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from activities.site import RouterControl, Site
from models.errors import EngineLost, ServiceUnreachable
from models.ids import FenceToken, RunRef
from models.ports import EngineHandle
from models.publication import WeightsRef
from models.routing import EngineState, RoutedEngine, RouterState, RoutingTable


def routed(
    engine: EngineHandle, weights: WeightsRef, state: EngineState = EngineState.SERVING
) -> RoutedEngine:
    """The table's row of an engine with these weights."""
    return RoutedEngine(
        name=engine.name,
        url=engine.url,
        incarnation=engine.incarnation,
        version=weights.version,
        digest=weights.digest,
        state=state,
    )


def table_of(
    engines: Sequence[EngineHandle],
    weights: WeightsRef,
    state: EngineState = EngineState.SERVING,
) -> RoutingTable:
    """All ``engines`` in one ``state``, with ``weights`` alone committed."""
    return RoutingTable(
        engines=tuple(routed(engine, weights, state) for engine in engines),
        committed=((weights.version, weights.digest),),
    )


@asynccontextmanager
async def connected_router(site: Site, run: RunRef) -> AsyncIterator[RouterControl | None]:
    """A client of the run's router; None for a run without one.

    Raises:
        EngineLost: the run should have a router and it is dead.
    """
    router = await site.fleet.router(run)
    if router is None:
        yield None
        return
    async with aclosing(site.router(router.url)) as client:
        yield client


async def router_state(site: Site, run: RunRef) -> RouterState | None:
    """What the router says of itself; None where there is none, or none that answers."""
    try:
        async with connected_router(site, run) as router:
            return None if router is None else await router.state()
    except (EngineLost, ServiceUnreachable):
        return None


async def route(
    site: Site,
    run: RunRef,
    token: FenceToken,
    engines: Sequence[EngineHandle],
    weights: WeightsRef,
    *,
    healed: bool = False,
) -> None:
    """Send the producer's requests to exactly ``engines``, each confirmed to hold ``weights``.

    ``healed``: some of them replace others, see ``ProducerPort.set_engines``.

    Raises:
        EngineLost: the run should have a router and it is dead.
        ServiceUnreachable: the router did not answer.
        StaleFence: a newer epoch owns the router or the producer.
    """
    router = await site.fleet.router(run)
    urls = tuple(engine.url for engine in engines)
    if router is not None:
        urls = (router.url,)
        async with aclosing(site.router(router.url)) as control:
            await control.set_table(token, table_of(engines, weights))
    await site.fleet.producer(run).set_engines(token, urls, healed=healed)
