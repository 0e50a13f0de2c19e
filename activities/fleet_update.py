"""New weights on all engines at once: each phase ends on every engine before the next begins.

A sample may then see the old weights or the new ones, never engines that disagree for longer than
one phase. Engines that fail are replaced and the phases are gone through once more; what serves the
weights already is only resumed, so this also continues an update that was cut off.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

import structlog

from activities.healing import restart_engines
from activities.loading import EngineUpdate, LoadOrder, Phase
from activities.publication_trace import BOUNDARY, PublicationTrace
from activities.sending import all_ended, send_buckets
from activities.site import Site
from activities.waking import HeadStart
from models.errors import EngineLost, ServiceUnreachable
from models.ports import EngineHandle
from models.publication import EngineConfirmation, EngineFailure

_WITH_BUCKET = (Phase.WAKE, Phase.INSPECT, Phase.PAUSE, Phase.LOAD)
"""Phases at whose end the trainer may hold a packed bucket."""

Opened = Callable[[Sequence[EngineHandle]], Awaitable[None]]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Updated:
    """Engines that serve the weights of an order, and what it took."""

    engines: tuple[EngineHandle, ...]
    confirmations: tuple[EngineConfirmation, ...]
    repeated: bool
    """All of them did before."""
    replaced: tuple[EngineFailure, ...] = ()


async def update_fleet(
    site: Site,
    order: LoadOrder,
    engines: Sequence[EngineHandle],
    trace: PublicationTrace,
    ahead: HeadStart | None = None,
    opened: Opened | None = None,
) -> Updated:
    """Make ``engines``, or else those that replace them, serve the weights of ``order``.

    ``ahead``: what was done for the first round of it; the caller closes it. ``opened``: called
    with engines that are all confirmed, while they are resumed; again if one of them fails then.

    Raises:
        EngineLost: there is no engine, or a replacement did not answer either.
        ContractViolation: a replacement refused, or serves other bytes than were exported.
        StaleFence: another epoch owns the run's root.
    """
    updates = await _round(site, order, engines, trace, ahead or HeadStart(), opened)
    failed = [update for update in updates if update.failure is not None]
    if not failed:
        return _updated(updates)
    failures = [update.failure for update in failed if update.failure is not None]
    engines = await replace_failed(site, order, failures, trace)
    again = await _round(site, order, engines, trace, HeadStart(), opened)
    for update in again:
        if update.error is not None:
            raise lost(order, update.error)
    return _updated(again, failures)


async def replace_failed(
    site: Site, order: LoadOrder, failures: Sequence[EngineFailure], trace: PublicationTrace
) -> tuple[EngineHandle, ...]:
    """End engines that failed an update and start others in their places; return all engines.

    Raises:
        EngineLost: a replacement did not start.
    """
    for failure in failures:
        _log.warning(
            "engine does not take new weights, replacing it",
            version=order.weights.version,
            **failure.model_dump(),
        )
    names = tuple(failure.engine for failure in failures)
    with trace.part(BOUNDARY):
        await site.fleet.replace_engines(order.token, order.run, names)
        return await restart_engines(site, order.run, order.token)


def lost(order: LoadOrder, error: Exception) -> Exception:
    """What the second failure of an engine is raised as: nobody retries an unreachable one."""
    if isinstance(error, ServiceUnreachable):
        return EngineLost(f"publication of version {order.weights.version}: {error.message}")
    return error


async def _round(
    site: Site,
    order: LoadOrder,
    engines: Sequence[EngineHandle],
    trace: PublicationTrace,
    ahead: HeadStart,
    opened: Opened | None,
) -> list[EngineUpdate]:
    """Take engines through the phases; stop after the first one that any of them fails.

    When it returns the trainer holds no bucket any more.
    """
    if not engines:
        raise EngineLost(f"run {order.run.run_id} has no live engine to publish to")
    async with AsyncExitStack() as stack:
        updates = [
            EngineUpdate(site, order, engine, ahead.waking(site, engine)) for engine in engines
        ]
        for update in updates:
            await stack.enter_async_context(aclosing(update))
        direct = order.weights.transport != "disk"
        trainer = site.fleet.trainer(order.run)
        for phase in Phase:
            with trace.part(phase.value):
                if phase is Phase.LOAD and direct:
                    await send_buckets(site, order, updates, trace, ahead.bucket)
                elif phase is Phase.VERIFY and direct:
                    verified = _everywhere(updates, phase, trace)
                    await all_ended([trainer.drop_bucket(order.token), verified])
                elif phase is Phase.RESUME and opened is not None:
                    await all_ended([opened(engines), _everywhere(updates, phase, trace)])
                else:
                    await _everywhere(updates, phase, trace)
            if any(update.failure is not None for update in updates):
                if direct and phase in _WITH_BUCKET:
                    # An engine that starts on the trainer's GPU counts on what is free there.
                    await trainer.drop_bucket(order.token)
                break
        return updates


async def _everywhere(
    updates: Sequence[EngineUpdate], phase: Phase, trace: PublicationTrace
) -> None:
    """One phase of every engine at once; returns, or raises, when the last one has ended."""

    async def attempt(update: EngineUpdate) -> None:
        with trace.step(f"engine_{phase.value}", engine=update.engine.name, url=update.engine.url):
            await update.attempt(phase)

    await all_ended(map(attempt, updates))


def _updated(updates: Sequence[EngineUpdate], replaced: Sequence[EngineFailure] = ()) -> Updated:
    return Updated(
        engines=tuple(update.engine for update in updates),
        confirmations=tuple(update.confirmation for update in updates),
        repeated=not replaced and all(update.repeated for update in updates),
        replaced=tuple(replaced),
    )
