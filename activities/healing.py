"""Keeping engines alive under a long call: a dead one is replaced, loaded, verified, routed to."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import structlog

from activities.loading import load_engine
from activities.site import Site
from models.errors import ContractViolation, EngineLost, ServiceUnreachable
from models.ids import FenceToken, RunRef
from models.ports import EngineHandle

_log = structlog.get_logger(__name__)

T = TypeVar("T")


async def heal(site: Site, run: RunRef, token: FenceToken, timeout_s: float) -> None:
    """Respawn dead engines, give them the exported weights, and route to all that live.

    Nothing is loaded before the first publication; that one loads every engine anyway.

    Raises:
        EngineLost: a replacement could not be made to serve the exported weights.
    """
    fresh = await site.fleet.heal_engines(token, run)
    if not fresh:
        return
    weights = await site.fleet.trainer(run).exported()
    if weights is None:
        return
    _log.info("loading replaced engines", engines=[engine.name for engine in fresh])
    try:
        await asyncio.gather(*(load_engine(site, engine, weights, timeout_s) for engine in fresh))
    except (ContractViolation, ServiceUnreachable) as error:
        raise EngineLost(f"a replaced engine does not serve: {error}") from error
    await route(site, run, token)


async def route(site: Site, run: RunRef, token: FenceToken) -> tuple[EngineHandle, ...]:
    """Send the producer's requests to exactly the live engines, and return those."""
    engines = await site.fleet.engines(run)
    urls = tuple(engine.url for engine in engines)
    await site.fleet.producer(run).set_engines(token, urls)
    return engines


async def with_healing(
    site: Site,
    run: RunRef,
    token: FenceToken,
    timeout_s: float,
    call: Callable[[], Awaitable[T]],
) -> T:
    """Await ``call`` of the producer while every engine that dies is replaced.

    Engines that died while nobody listened are replaced first. Raises what ``call`` raises, or
    ``EngineLost`` when a replacement fails; ``call`` is cancelled then.
    """
    one_heal_at_a_time = asyncio.Lock()

    async def repair() -> None:
        async with one_heal_at_a_time:
            await heal(site, run, token, timeout_s)

    async def work() -> T:
        await repair()
        return await call()

    async def watch(deaths: AsyncIterator[str]) -> None:
        async for name in deaths:
            _log.warning("engine died", engine=name, run=run.run_id)
            await repair()

    async with site.fleet.engine_deaths(run) as deaths:
        working = asyncio.create_task(work())
        watching = asyncio.create_task(watch(deaths))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not working.done():
                watching.result()
            return await working
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)
