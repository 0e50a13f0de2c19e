"""Keeping engines alive under a long call: a dead one is replaced, loaded, verified, routed to.

Dead means: its process ended, or it lives and hangs, or the router of a fully async run does not
route to it because it says that it serves other weights. Who hangs is told by the router, and in a
run without one by looks at the engines while they are needed. A router that died or does not answer
is replaced with the engines; it starts without a table and gets one.

Two workers may heal one run at once, each with its own lock. Both start engines under the same
actor names, of which the cluster keeps one: the later start ends the earlier one, whose worker then
follows the name to the survivor. Work is wasted, nothing is served that was not verified.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import structlog

from activities.engine_health import EngineHealth
from activities.loading import LoadOrder, load_engines, update_timeout_s
from activities.routing import connected_router, route
from activities.site import Site
from activities.wire.health import INTERVAL_S
from configs.run import RunSpec
from models.errors import EngineLost, PerdureError, ServiceUnreachable
from models.ids import FenceToken, RunRef
from models.ports import EngineHandle
from models.publication import WeightsRef
from models.routing import EngineState, RoutedEngineStatus

LOOK_EVERY_S = 3.0
"""Time between looks at what the router thinks of its engines: it tells nobody by itself."""

ROUTER = "router"
"""Its name beside those of engines."""

_log = structlog.get_logger(__name__)

T = TypeVar("T")


async def restart_engines(site: Site, run: RunRef, token: FenceToken) -> tuple[EngineHandle, ...]:
    """Replace engines that are dead or that the router gave up, and a router that is dead or hangs.

    Returns all engines; nobody has asked what they serve.

    Raises:
        StaleFence: the token's epoch does not own the run's root any more.
        EngineLost: a replacement did not start.
    """
    await _end_given_up(site, run, token)
    return await site.fleet.ensure_engines(token, run)


async def heal(
    site: Site, run: RunRef, token: FenceToken, timeout_s: float, hung: Sequence[str] = ()
) -> None:
    """Restart what is dead, give it the exported weights, and route to all that live.

    Engines named in ``hung`` count as dead.

    Nothing is loaded before the first publication; that one loads every engine anyway. A router
    that is lost meanwhile is replaced as well, once.

    Raises:
        EngineLost: a replacement could not be made to serve the exported weights.
        StaleFence: the token's epoch does not own the run's root any more.
    """
    try:
        await _heal(site, run, token, timeout_s, hung)
    except (EngineLost, ServiceUnreachable) as error:
        if not await _router_is_lost(site, run):
            raise
        _log.warning("the router was lost under a heal", reason=error.message)
        await _heal(site, run, token, timeout_s)


async def _heal(
    site: Site, run: RunRef, token: FenceToken, timeout_s: float, hung: Sequence[str] = ()
) -> None:
    await _end_given_up(site, run, token, hung)
    fresh = await site.fleet.heal_engines(token, run)
    rows = await _seen_by_router(site, run)
    if rows is None and not fresh:
        return
    weights, engines = await asyncio.gather(
        site.fleet.trainer(run).exported(), site.fleet.engines(run)
    )
    if weights is None:
        return
    unsure = _unsure(engines, fresh, weights, rows)
    if not unsure:
        return
    _log.info("loading engines", engines=[engine.name for engine in unsure])
    if not weights.on_disk:
        trainer, version = site.fleet.trainer(run), weights.version
        weights = await trainer.kept(version) or await trainer.export_weights(token, version)
    order = LoadOrder(run, token, weights, timeout_s)
    failures = await load_engines(site, order, unsure)
    if failures:
        _log.warning("engines do not load, replacing them", errors=_messages(failures))
        await site.fleet.replace_engines(token, run, tuple(failures))
        engines = await site.fleet.ensure_engines(token, run)
        again = [engine for engine in engines if engine.name in failures]
        failures = await load_engines(site, order, again)
    if failures:
        raise EngineLost(f"a replaced engine does not serve: {_messages(failures)}")
    await route(site, run, token, engines, weights, healed=True)


async def with_healing(
    site: Site, run: RunRef, token: FenceToken, spec: RunSpec, call: Callable[[], Awaitable[T]]
) -> T:
    """Await ``call`` of the producer while every engine that dies is replaced.

    Engines that died while nobody listened are replaced first. Raises what ``call`` raises, or
    ``EngineLost`` when a replacement fails; ``call`` is cancelled then.
    """
    healer = _Healer(site, run, token, spec)

    async def work() -> T:
        await healer.repair()
        return await call()

    async with site.fleet.engine_deaths(run) as deaths:
        working = asyncio.create_task(work())
        watching = asyncio.create_task(healer.watch(deaths))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not working.done():
                watching.result()
            return await working
        finally:
            await _end(working, watching)


async def beside_healing(
    site: Site, run: RunRef, token: FenceToken, spec: RunSpec, call: Callable[[], Awaitable[T]]
) -> T:
    """Await ``call``, which needs no engine itself, and keep engines alive for who works meanwhile.

    That is the producer of a fully async run; without one this is ``call`` alone. ``call`` is never
    ended because of an engine: a failed heal is logged and tried again at the next death, and every
    stage that needs engines heals before all else and raises what fails there. A heal that runs
    when ``call`` returns is waited for, since the next stage would have to start it anew.
    """
    if not spec.fully_async:
        return await call()
    healer = _Healer(site, run, token, spec)
    keeping = asyncio.create_task(healer.keep())
    try:
        result = await call()
        await healer.settled()
        return result
    finally:
        await _end(keeping)


class _Healer:
    """Heals a run's engines one heal at a time, for as long as an activity runs."""

    def __init__(self, site: Site, run: RunRef, token: FenceToken, spec: RunSpec) -> None:
        self._site, self._run, self._token = site, run, token
        self._timeout_s = update_timeout_s(spec)
        self._routed = spec.fully_async
        self._health = EngineHealth(site, run)
        self._heals = 0
        self._one_at_a_time = asyncio.Lock()

    async def repair(self, hung: Sequence[str] = ()) -> None:
        """``heal``, after the one that runs."""
        async with self._one_at_a_time:
            self._heals += 1
            await heal(self._site, self._run, self._token, self._timeout_s, hung)

    async def settled(self) -> None:
        """Return when no heal runs."""
        async with self._one_at_a_time:
            return

    async def watch(self, deaths: AsyncIterator[str]) -> None:
        """Repair at every death, and whenever an engine lives and hangs or was given up."""
        async with aclosing(self._losses(deaths)) as losses:
            async for loss in losses:
                _log.warning("engine lost", engines=loss.names, run=self._run.run_id)
                await self.repair(loss.hung)

    async def keep(self) -> None:
        """``watch``, from a first repair on, whatever of it fails."""
        try:
            async with (
                self._site.fleet.engine_deaths(self._run) as deaths,
                aclosing(self._losses(deaths)) as losses,
            ):
                await self._tried()
                async for loss in losses:
                    _log.warning("engine lost", engines=loss.names, run=self._run.run_id)
                    await self._tried()
        except PerdureError as error:
            _log.warning("engines are not watched any more", reason=error.message)

    async def _tried(self) -> None:
        try:
            await self.repair()
        except PerdureError as error:
            _log.warning("engines are not healed, the next stage tries again", reason=error.message)

    async def _losses(self, deaths: AsyncIterator[str]) -> AsyncGenerator["_Loss", None]:
        """What died, and what lives and must be replaced."""
        dying = asyncio.ensure_future(anext(deaths))
        looking = asyncio.ensure_future(self._look())
        try:
            while True:
                await asyncio.wait({dying, looking}, return_when=asyncio.FIRST_COMPLETED)
                if dying.done():
                    yield _Loss((dying.result(),))
                    dying = asyncio.ensure_future(anext(deaths))
                if looking.done():
                    if loss := looking.result():
                        yield loss
                    looking = asyncio.ensure_future(self._look())
        finally:
            await _end(dying, looking)

    async def _look(self) -> "_Loss | None":
        """What is found by looking, after the time between two looks."""
        if self._routed:
            await asyncio.sleep(LOOK_EVERY_S)
            names = await _given_up(self._site, self._run)
            return _Loss(names) if names else None
        await asyncio.sleep(INTERVAL_S)
        heals = self._heals
        names = () if self._one_at_a_time.locked() else await self._health.hung()
        if self._one_at_a_time.locked() or heals != self._heals:
            self._health.forget()  # a heal pauses what it loads
            return None
        return _Loss(names, names) if names else None


class _Loss(NamedTuple):
    """Why to heal."""

    names: tuple[str, ...]
    hung: tuple[str, ...] = ()
    """Those that must be ended first. Of a dead one the name may be its replacement's already."""


async def _end_given_up(
    site: Site, run: RunRef, token: FenceToken, hung: Sequence[str] = ()
) -> None:
    """End what ``_given_up`` names, and the engines in ``hung``."""
    names = tuple({*await _given_up(site, run), *hung})
    if names:
        _log.warning("replacing what lives and does not serve", servers=names)
        await site.fleet.replace_engines(token, run, names)


async def _given_up(site: Site, run: RunRef) -> tuple[str, ...]:
    """Names of what lives and must be replaced.

    That is a router that does not answer, and engines that it will not route to again by itself.
    """
    try:
        rows = await _rows(site, run) or ()
    except EngineLost:  # the router is dead: no more needs to be ended
        return ()
    except ServiceUnreachable as error:
        _log.warning("the router does not answer", reason=error.message)
        return (ROUTER,)
    given_up = {
        (row.engine.name, row.engine.incarnation)
        for row in rows
        if row.engine.state is EngineState.UNAVAILABLE
        or (row.engine.state is EngineState.SERVING and not row.routable)
    }
    if not given_up:
        return ()
    live = await site.fleet.engines(run)
    return tuple(each.name for each in live if (each.name, each.incarnation) in given_up)


def _unsure(
    engines: Sequence[EngineHandle],
    fresh: Sequence[EngineHandle],
    weights: WeightsRef,
    rows: Sequence[RoutedEngineStatus] | None,
) -> list[EngineHandle]:
    """Engines to load or verify: the fresh ones, and those that the router does not route to.

    ``rows``: as the router sees them. None without a router: the producer keeps what it was told,
    so the fresh ones are all there is.
    """
    if rows is None:
        return list(fresh)
    known = {
        (row.engine.name, row.engine.incarnation, row.engine.url)
        for row in rows
        if row.routable
        and (row.engine.version, row.engine.digest) == (weights.version, weights.digest)
    }
    return [
        engine
        for engine in engines
        if engine in fresh or (engine.name, engine.incarnation, engine.url) not in known
    ]


async def _seen_by_router(site: Site, run: RunRef) -> tuple[RoutedEngineStatus, ...] | None:
    """``_rows``; none of a router that is dead or does not answer."""
    try:
        return await _rows(site, run)
    except (EngineLost, ServiceUnreachable):
        return ()


async def _router_is_lost(site: Site, run: RunRef) -> bool:
    """Whether the run should have a router and it is dead or does not answer."""
    try:
        await _rows(site, run)
    except (EngineLost, ServiceUnreachable):
        return True
    return False


def _messages(failures: Mapping[str, PerdureError]) -> str:
    return "; ".join(error.message for error in failures.values())


async def _rows(site: Site, run: RunRef) -> tuple[RoutedEngineStatus, ...] | None:
    """The engines as the router sees them; None for a run without one. Asked twice at most.

    Raises:
        EngineLost: the router is dead.
        ServiceUnreachable: it does not answer.
    """
    async with connected_router(site, run) as router:
        if router is None:
            return None
        try:
            return (await router.state()).engines
        except ServiceUnreachable:  # a busy machine, it may be
            return (await router.state()).engines


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel ``tasks`` and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
