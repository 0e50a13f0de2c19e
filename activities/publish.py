"""``publish``: a policy version live on every engine, each confirmed by version and digest.

::

    heal, export or offer -> [begin] -> engines -> routing -> [end] -> copy to the host

Engines of a colocated run take their memory back as soon as they are healed, beside the offer. The
steps in brackets are the producer's boundary in a fully async run. Whatever fails between them
leaves the boundary closed and engines that nobody confirmed paused; the next attempt, or the next
epoch, goes the whole way again, and what it finds done moves nothing.
"""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import aclosing
from functools import partial
from typing import TypeVar, cast

import structlog

from activities.fleet_update import Updated, update_fleet
from activities.healing import restart_engines
from activities.heartbeat import beating
from activities.loading import LoadOrder, Phase, update_timeout_s
from activities.publication_trace import BOUNDARY, PublicationTrace, diagnostics_wanted
from activities.rolling import DRAIN, RollingEvents, RollingUpdate
from activities.routing import connected_router, route, router_state, table_of
from activities.site import Site, spec_of, store_of
from activities.storage import layout
from activities.storage.store import Store
from activities.timing import timed
from activities.waking import HeadStart
from configs.run import RunSpec
from models.errors import EngineLost, ServiceUnreachable
from models.ids import FenceToken
from models.ports import EngineHandle
from models.publication import PublicationReport, PublishRequest, WeightsRef
from models.routing import EngineState

EXPORT = "export"
FOLDER = "folder"
ROUTING = "routing"

_log = structlog.get_logger(__name__)

A = TypeVar("A")
B = TypeVar("B")


async def publish(site: Site, request: PublishRequest, token: FenceToken) -> PublicationReport:
    """Export, load everywhere, route. Publishing what is live already moves nothing.

    Raises:
        EngineLost: an engine did not come to serve the version, its replacement neither.
        ContractViolation: a replacement refused as well, or serves other bytes than were exported.
        ServiceUnreachable: the router did not answer; another attempt replaces it.
    """
    return await beating(_publish(site, request, token), f"publish {request.version}")


async def _publish(site: Site, request: PublishRequest, token: FenceToken) -> PublicationReport:
    store = store_of(request.run)
    spec = await asyncio.to_thread(spec_of, request.run)
    first = request.update == 0
    stage = "initial_publication" if first else "publication"
    rollout_id = None if first else request.update - 1
    trace = PublicationTrace(request.version, verbose=diagnostics_wanted(spec.launch.env))
    async with timed(store, stage, rollout_id, {"version": request.version}):
        with trace.watched():
            report = await _make_live(site, request, token, spec, trace)
    await asyncio.to_thread(_append, store, request, report)
    site.tracker.log(
        request.run,
        {
            "train/step": max(0, request.version - 1),
            "publication/export_seconds": report.export_seconds,
            "publication/load_seconds": report.load_seconds,
            "publication/total_seconds": report.total_seconds,
        },
    )
    return report


async def _make_live(
    site: Site, request: PublishRequest, token: FenceToken, spec: RunSpec, trace: PublicationTrace
) -> PublicationReport:
    run = request.run
    async with aclosing(HeadStart()) as ahead:
        engines, weights = await _begun(site, request, token, spec, trace, ahead)
        order = LoadOrder(run, token, weights, update_timeout_s(spec))
        if spec.fully_async:
            updated = await _publish_past_router_loss(site, order, spec, trace)
        else:
            # Nobody samples before this call ends, so the producer may hear of them at once.
            opened = partial(route, site, run, token, weights=weights)
            updated = await update_fleet(site, order, engines, trace, ahead, opened)
    if spec.publication_transport != "disk" and spec.fully_async:
        # What replaces an engine while the trainer works loads weights that it does not hold any
        # more. In other runs nobody samples then. Whoever heals an engine has the folder written.
        with trace.part(FOLDER):
            await site.fleet.trainer(run).keep_offered(token, request.version)
    return _report(weights, updated, spec, trace)


async def _begun(
    site: Site,
    request: PublishRequest,
    token: FenceToken,
    spec: RunSpec,
    trace: PublicationTrace,
    ahead: HeadStart,
) -> tuple[tuple[EngineHandle, ...], WeightsRef]:
    """The living engines, and the weights as the trainer offers them.

    Where engines take turns with the trainer they also get their memory. That needs no more than to
    wake them afterwards: the trainer's allocator gives nothing back while it packs a single bucket,
    so the most that it takes is what it has at the end.
    """
    trainer, direct = site.fleet.trainer(request.run), spec.publication_transport != "disk"
    admitted: asyncio.Future[None] | None = None
    if direct and spec.colocated:
        # Engines take no fence token. A caller that the trainer refuses, or that has to wait for
        # a step of it, must not take memory from it.
        admitted = asyncio.ensure_future(trainer.drop_bucket(token))

    async def heal() -> tuple[EngineHandle, ...]:
        with trace.part(BOUNDARY):
            engines = await restart_engines(site, request.run, token)
        if admitted is not None:
            await admitted
            with trace.part(Phase.WAKE):
                await ahead.wake(site, engines, update_timeout_s(spec))
        return engines

    async def export() -> WeightsRef:
        with trace.part(EXPORT):
            if not direct:
                return await trainer.export_weights(token, request.version)
            if admitted is not None:
                await admitted
            offer = await trainer.offer_weights(token, request.version)
            ahead.bucket = offer.bucket
            return offer.weights

    return await _both(heal(), export())


async def _publish_past_router_loss(
    site: Site, order: LoadOrder, spec: RunSpec, trace: PublicationTrace
) -> Updated:
    """``_publish_under_load``, once more when the router was lost meanwhile: it is replaced."""
    try:
        return await _publish_under_load(site, order, spec, trace)
    except (EngineLost, ServiceUnreachable) as error:
        if await router_state(site, order.run) is not None:
            raise
        _log.warning("the router was lost under a publication", reason=error.message)
    with trace.part(BOUNDARY):
        await restart_engines(site, order.run, order.token)
    return await _publish_under_load(site, order, spec, trace)


async def _publish_under_load(
    site: Site, order: LoadOrder, spec: RunSpec, trace: PublicationTrace
) -> Updated:
    """Between the producer's ``begin_publication`` and ``end_publication``."""
    version = order.weights.version
    producer = site.fleet.producer(order.run)
    rolling = spec.core.publication_mode == "rolling"
    events = RollingEvents(order)
    if rolling:
        await events.note("snapshot_ready")
    with trace.part(BOUNDARY):
        await producer.begin_publication(order.token, version)
    update = _update_rolling if rolling else _update_at_once
    updated = await update(site, order, spec, trace)
    with trace.part(ROUTING):
        await route(site, order.run, order.token, updated.engines, order.weights)
        await producer.end_publication(order.token, version)
    if rolling:
        await events.note("snapshot_released")
    return updated


async def _update_at_once(
    site: Site, order: LoadOrder, spec: RunSpec, trace: PublicationTrace
) -> Updated:
    """Nothing is routable from the first pause to the last confirmation."""
    with trace.part(BOUNDARY):
        engines = await site.fleet.engines(order.run)
        async with connected_router(site, order.run) as router:
            if router is not None:
                closed = table_of(engines, order.weights, EngineState.UPDATING)
                await router.set_table(order.token, closed)
    return await update_fleet(site, order, engines, trace)


async def _update_rolling(
    site: Site, order: LoadOrder, spec: RunSpec, trace: PublicationTrace
) -> Updated:
    """Engine by engine; all at once while nothing is routed to, as before the first one."""
    async with connected_router(site, order.run) as router:
        if router is not None:
            routed = await router.state()
            if routed.engines:
                timeout_s = spec.inference.drain_timeout_s
                return await RollingUpdate(site, order, router, timeout_s, trace).run(routed)
    return await _update_at_once(site, order, spec, trace)


async def _both(first: Awaitable[A], second: Awaitable[B]) -> tuple[A, B]:
    """Both results; raises when both have ended, the first one's error before the second's."""
    ends = await asyncio.gather(first, second, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return cast("tuple[A, B]", tuple(ends))


def _report(
    weights: WeightsRef, updated: Updated, spec: RunSpec, trace: PublicationTrace
) -> PublicationReport:
    seconds = trace.seconds
    return PublicationReport(
        version=weights.version,
        digest=weights.digest,
        repeated_version=updated.repeated,
        engines=updated.confirmations,
        replaced=updated.replaced,
        mode=spec.core.publication_mode,
        transport=weights.transport,
        num_buckets=max(1, weights.num_buckets),
        folder_seconds=seconds[FOLDER],
        boundary_seconds=seconds[BOUNDARY],
        export_seconds=seconds[EXPORT],
        memory_seconds=seconds[Phase.WAKE],
        pause_seconds=seconds[Phase.INSPECT] + seconds[DRAIN] + seconds[Phase.PAUSE],
        load_seconds=seconds[Phase.LOAD] + seconds[Phase.VERIFY],
        finalize_seconds=seconds[Phase.RESUME] + seconds[ROUTING],
        total_seconds=trace.total_seconds,
        num_bytes=weights.num_bytes,
        num_tensors=weights.num_tensors,
    )


def _append(store: Store, request: PublishRequest, report: PublicationReport) -> None:
    """One row: the report, and the same times under the names that analyses of runs look for."""
    row = {
        "rollout_id": request.update - 1,
        "epoch": request.epoch,
        "time_unix": time.time(),
        "transport": report.transport,
        "tensors": report.num_tensors,
        "bytes": report.num_bytes,
        "buckets": 0 if report.repeated_version else report.num_buckets,
        "pause_connect_seconds": report.boundary_seconds + report.pause_seconds,
        "export_pack_seconds": report.export_seconds,
        "transport_load_seconds": report.load_seconds,
        **report.model_dump(mode="json", exclude={"metrics"}),
    }
    store.append_jsonl(layout.PUBLICATION, row)
