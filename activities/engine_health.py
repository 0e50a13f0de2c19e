"""Looks at the engines of a run without a router: a hung one has to be told by somebody.

Where there is a router, its health loop does this. Nobody looks while engines are paused: such a
run pauses them in its publications alone, and nothing is sampled meanwhile.
"""

import asyncio
from contextlib import aclosing

import structlog

from activities.multiplier import infra_timeout_multiplier
from activities.site import Site
from activities.wire.health import TIMEOUT_S, FailedLooks
from models.ids import RunRef
from models.ports import EngineHandle

_log = structlog.get_logger(__name__)


class EngineHealth:
    """Counts failed looks at each engine process of ``run``."""

    def __init__(self, site: Site, run: RunRef) -> None:
        self._site, self._run = site, run
        self._looks = FailedLooks()

    async def hung(self) -> tuple[str, ...]:
        """Look at every engine once, all at the same time; the names of those that hang."""
        engines = await self._site.fleet.engines(self._run)
        self._looks.keep({_key(each) for each in engines})
        answers = await asyncio.gather(*map(self._look, engines))
        return tuple(
            engine.name
            for engine, healthy in zip(engines, answers, strict=True)
            if self._looks.note(_key(engine), healthy)
        )

    def forget(self) -> None:
        """Start over: engines were paused or replaced meanwhile."""
        self._looks.keep(())

    async def _look(self, engine: EngineHandle) -> bool:
        async with aclosing(self._site.engine(engine.url)) as client:
            healthy = await client.health(timeout_s=TIMEOUT_S * infra_timeout_multiplier())
        if not healthy:
            _log.warning("an engine fails a look at it", engine=engine.name, url=engine.url)
        return healthy


def _key(engine: EngineHandle) -> tuple[str, int]:
    """One process: its name passes to its replacement."""
    return engine.name, engine.incarnation
