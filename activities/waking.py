"""An engine that has its memory: looked at, and told to take back what it gave to the trainer.

Nothing of it needs to know which weights come, so it may begin before the trainer has them, see
``HeadStart``.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from activities.site import EngineControl, Site
from activities.wire.contract import MemoryTag
from activities.wire.memory_marks import memory_state
from models.errors import ContractViolation, ServiceUnreachable
from models.ports import EngineHandle
from models.publication import WeightBucket

MEMORY: tuple[MemoryTag, ...] = ("kv_cache", "weights")
"""All that an engine of a training run gives back to a colocated trainer."""


class Waking:
    """One engine on its way to its memory. Used once; close it afterwards.

    What it ends with is kept until somebody asks for it with ``ended``. An engine that was woken
    stays paused: only whoever confirms its weights opens it.
    """

    def __init__(self, site: Site, engine: EngineHandle) -> None:
        self.engine = engine
        self.client: EngineControl = site.engine(engine.url)
        """The one client that may go on with the engine: it knows what it did to it."""
        self.started = time.monotonic()
        self.found = ""
        """The weight version before anything was done to the engine."""
        self.is_paused = False
        """The engine was paused, for it had memory to take back."""
        self._is_over = False
        self._error: ContractViolation | ServiceUnreachable | None = None

    async def begin(self, timeout_s: float) -> None:
        """Wake it within ``timeout_s`` seconds. Nothing is raised but by ``ended``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake()
        except TimeoutError:
            self._error = ServiceUnreachable(
                f"{self.engine.name} at {self.engine.url}: not awake within {timeout_s:g} s"
            )
        except (ContractViolation, ServiceUnreachable) as error:
            self._error = error
        self._is_over = True

    async def ended(self) -> None:
        """Return when the engine has its memory; wake it if that was not begun.

        Raises:
            ServiceUnreachable: it did not answer.
            ContractViolation: it refused, or nobody knows which memory it has.
        """
        if not self._is_over:
            await self._wake()
            self._is_over = True
        if self._error is not None:
            raise self._error

    async def aclose(self) -> None:
        """Close the connections."""
        await self.client.aclose()

    async def _wake(self) -> None:
        self.found = str((await self.client.model_info()).get("weight_version", ""))
        state = memory_state(self.found)
        if state.is_known and not state.released:
            return
        await self.client.pause("abort")
        await self.client.resume_memory(MEMORY)
        self.is_paused = True


@dataclass(slots=True)
class HeadStart:
    """What was done for a publication before its phases begin. Each of it serves one round."""

    wakings: Sequence[Waking] = ()
    """Of the engines that are being woken, or were."""
    bucket: WeightBucket | None = None
    """The only bucket of the weights, packed."""

    def waking(self, site: Site, engine: EngineHandle) -> Waking:
        """That of ``engine``; a new one when nobody has begun."""
        known = (each for each in self.wakings if each.engine == engine)
        return next(known, None) or Waking(site, engine)

    async def wake(self, site: Site, engines: Sequence[EngineHandle], timeout_s: float) -> None:
        """Wake ``engines`` at once, each within ``timeout_s`` seconds; what fails is told later."""
        self.wakings = tuple(Waking(site, engine) for engine in engines)
        await asyncio.gather(*(waking.begin(timeout_s) for waking in self.wakings))

    async def aclose(self) -> None:
        """Close the connections of all that were woken; once more does nothing."""
        async with AsyncExitStack() as stack:
            for waking in self.wakings:
                await stack.enter_async_context(aclosing(waking))
