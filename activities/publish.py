"""``publish``: a policy version live on every engine, each confirmed by version and digest."""

import asyncio
import time
from collections.abc import Sequence

import structlog

from activities.healing import route
from activities.heartbeat import beating
from activities.loading import EngineLoad, load_engine
from activities.site import Site, spec_of, store_of
from activities.storage import layout
from activities.storage.store import Store
from activities.timing import timed
from models.errors import ContractViolation, EngineLost, ServiceUnreachable
from models.ids import FenceToken
from models.ports import EngineHandle
from models.publication import PublicationReport, PublishRequest, WeightsRef

_log = structlog.get_logger(__name__)


async def publish(site: Site, request: PublishRequest, token: FenceToken) -> PublicationReport:
    """Export, load everywhere, route. Publishing what is live already moves nothing.

    Raises:
        EngineLost: an engine did not come to serve the version, its replacement neither.
        ContractViolation: an engine refused twice, or serves other bytes than were exported.
    """
    store = store_of(request.run)
    spec = await asyncio.to_thread(spec_of, request.run)
    first = request.update == 0
    stage = "initial_publication" if first else "publication"
    rollout_id = None if first else request.update - 1
    async with timed(store, stage, rollout_id, {"version": request.version}):
        report = await beating(
            _publish(site, request, token, spec.inference.update_timeout_s),
            f"publish {request.version}",
        )
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


async def _publish(
    site: Site, request: PublishRequest, token: FenceToken, timeout_s: float
) -> PublicationReport:
    started = time.monotonic()
    await site.fleet.heal_engines(token, request.run)
    weights = await site.fleet.trainer(request.run).export_weights(token, request.version)
    exported = time.monotonic()
    loads = await _load_all(site, request, token, weights, timeout_s)
    await route(site, request.run, token)
    return PublicationReport(
        version=weights.version,
        digest=weights.digest,
        repeated_version=all(load.repeated for load in loads),
        engines=tuple(load.confirmation for load in loads),
        export_seconds=exported - started,
        pause_seconds=max(load.pause_seconds for load in loads),
        load_seconds=max(load.load_seconds for load in loads),
        total_seconds=time.monotonic() - started,
        num_bytes=weights.num_bytes,
        num_tensors=weights.num_tensors,
    )


async def _load_all(
    site: Site, request: PublishRequest, token: FenceToken, weights: WeightsRef, timeout_s: float
) -> list[EngineLoad]:
    """Load every engine at once; those that fail get one more chance after a heal."""
    engines = await site.fleet.engines(request.run)
    if not engines:
        raise EngineLost(f"run {request.run.run_id} has no live engine to publish to")
    try:
        return await _gather(site, engines, weights, timeout_s)
    except (ContractViolation, ServiceUnreachable) as error:
        _log.warning("publication failed, replacing engines", version=weights.version, why=error)
    await site.fleet.heal_engines(token, request.run)
    try:
        return await _gather(site, await site.fleet.engines(request.run), weights, timeout_s)
    except ServiceUnreachable as error:
        raise EngineLost(f"publication of version {weights.version}: {error}") from error


async def _gather(
    site: Site, engines: Sequence[EngineHandle], weights: WeightsRef, timeout_s: float
) -> list[EngineLoad]:
    """Load ``engines`` concurrently, wait for all of them, then raise the first error."""
    results = await asyncio.gather(
        *(load_engine(site, engine, weights, timeout_s) for engine in engines),
        return_exceptions=True,
    )
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise errors[0]
    return [result for result in results if isinstance(result, EngineLoad)]


def _append(store: Store, request: PublishRequest, report: PublicationReport) -> None:
    row = {
        "rollout_id": request.update - 1,
        "epoch": request.epoch,
        "time_unix": time.time(),
        "transport": "disk",
        **report.model_dump(mode="json", exclude={"metrics"}),
    }
    store.append_jsonl(layout.PUBLICATION, row)
