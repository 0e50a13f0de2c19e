"""Colocated engines and the trainer take turns with memory: engines give theirs back for a step.

::

    collect -> pause, release | optimize | wake, load, verify, resume -> collect
               ^ here                      ^ the publication, see ``loading``

An engine that does not give its memory back is ended, which frees it as well; the publication
starts another once the trainer has stepped. Nothing samples in between: a publication comes after
every update and before whatever needs engines.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import structlog

from activities.loading import update_timeout_s
from activities.site import Site, store_of
from activities.storage.lease import require_epoch
from activities.timing import timed
from activities.waking import MEMORY
from configs.run import RunSpec
from models.errors import ContractViolation, EngineLost, PerdureError, ServiceUnreachable
from models.ids import FenceToken, RunRef
from models.ports import EngineHandle

STAGE = "engine_release"
"""Its row in ``driver_timing.jsonl``."""

_log = structlog.get_logger(__name__)


async def give_memory_to_trainer(
    site: Site, run: RunRef, token: FenceToken, spec: RunSpec, update: int
) -> None:
    """Pause every engine of a colocated run and release its memory; nothing in any other run.

    Engines that have released theirs already keep it so.

    Raises:
        StaleFence: the token's epoch does not own the run's root any more.
    """
    if not spec.colocated:
        return
    async with timed(store_of(run), STAGE, update):
        await asyncio.to_thread(require_epoch, store_of(run), token.epoch)
        engines = await site.fleet.engines(run)
        timeout_s = update_timeout_s(spec)
        ends = await asyncio.gather(*(_released(site, each, timeout_s) for each in engines))
        failed = _failed(engines, ends)
        if failed:
            await site.fleet.replace_engines(token, run, failed)


async def _released(site: Site, engine: EngineHandle, timeout_s: float) -> PerdureError | None:
    """Pause and release one engine within ``timeout_s`` seconds; why it did not work."""
    try:
        async with asyncio.timeout(timeout_s), aclosing(site.engine(engine.url)) as client:
            await client.pause("abort")
            await client.release_memory(MEMORY)
    except (ContractViolation, ServiceUnreachable) as error:
        return error
    except TimeoutError:
        return EngineLost(
            f"{engine.name} at {engine.url} did not release its memory within {timeout_s:g} s "
            "(inference.update_timeout_s)"
        )
    return None


def _failed(
    engines: Sequence[EngineHandle], ends: Sequence[PerdureError | None]
) -> tuple[str, ...]:
    """Names of the engines that failed, each logged."""
    failed = [(engine, end) for engine, end in zip(engines, ends, strict=True) if end is not None]
    for engine, error in failed:
        _log.warning("engine keeps its memory, ending it", engine=engine.name, reason=error.message)
    return tuple(engine.name for engine, _ in failed)
