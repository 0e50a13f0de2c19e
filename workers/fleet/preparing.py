"""``prepare``: which components of a run are kept, which are rebuilt, and from what.

    run file -> prepared/ -> trainer: keep, or rebuild from the checkpoint
                          -> producer: keep with its trainer, or rebuild at the data position
                          -> engines: keep the live ones
                          -> router (fully async runs): keep the live one

They are started at the same time; on GPUs engines wait for the trainer, see ``_bring_up``.
Components of the new epoch refuse every older one.
"""

import asyncio
import re
import time
from dataclasses import dataclass

import structlog

from activities.storage import layout
from activities.storage.commit import read_cursor, verify_checkpoint
from activities.storage.lease import require_epoch
from activities.storage.store import Store
from models.checkpoint import PolicyClock
from models.errors import ActorLost, ContractViolation, ServiceUnreachable
from models.ids import FenceToken
from models.prompt import DataState
from models.rollout import CollectionManifest
from models.run import PrepareReport, PrepareRequest
from workers.actors.order import ActorFacts, ActorOrder
from workers.actors.preparation import PreparationActor, PreparedRun, find_prepared
from workers.actors.producer import ProducerActor
from workers.fleet.calls import settle
from workers.fleet.engines import Engines, Ensured, together
from workers.fleet.folders import scratch_folder
from workers.fleet.placement import engine_bundles, in_bundle, place, trainer_bundle
from workers.fleet.router import Router
from workers.fleet.run_fleet import RunFleet

PRODUCER_CPUS = 0.01

_MANIFEST = re.compile(r"(\d{7,})\.e(\d+)\.json")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _TrainerPlan:
    """A live trainer to keep, or where a new one starts."""

    kept: ActorFacts | None
    folder: str | None = None
    clock: PolicyClock | None = None


async def prepare(
    fleet: RunFleet, engines: Engines, router: Router, token: FenceToken, request: PrepareRequest
) -> PrepareReport:
    """See ``FleetPort.prepare``; the caller holds ``fleet.lock``."""
    started = time.monotonic()
    await asyncio.to_thread(require_epoch, fleet.store, token.epoch)
    prepared = await _prepared(fleet)
    placing = time.monotonic()
    plan = await _plan_trainer(fleet, token, request)
    keep_producer = plan.kept is not None and await _keep_producer(fleet, token)
    await asyncio.to_thread(require_epoch, fleet.store, token.epoch)
    trainer, rebuilt = await _bring_up(
        fleet, engines, router, token, request, prepared, plan, keep_producer
    )
    next_update = trainer.next_update or 0
    return PrepareReport(
        next_update=next_update,
        policy_version=trainer.status.policy_version or 0,
        consumed_through=next_update - 1,
        train_prompts=prepared.train_prompts,
        eval_prompts=prepared.eval_prompts,
        model_parameters=prepared.num_parameters,
        rebuilt=rebuilt,
        seconds=time.monotonic() - started,
        fleet_seconds=time.monotonic() - placing,
    )


async def _prepared(fleet: RunFleet) -> PreparedRun:
    """What ``prepared/`` holds; made by an actor that ends with this call or this process."""
    found = await asyncio.to_thread(find_prepared, fleet.store, fleet.run.spec_sha256)
    if found is not None:
        return found
    order = ActorOrder(
        run=fleet.run, role="preparation", scratch=str(scratch_folder(fleet.run.root))
    )
    handle = await fleet.cluster.create_bound(PreparationActor, {"num_cpus": 0}, order)
    try:
        report: PreparedRun = await settle(
            handle.prepare.remote(),
            f"preparation of {fleet.run.run_id}",
            ActorLost,
            "prepare()",
            await fleet.startup_timeout_s() + await fleet.download_timeout_s(),
        )
        return report
    finally:
        await fleet.cluster.kill(handle)


async def _plan_trainer(
    fleet: RunFleet, token: FenceToken, request: PrepareRequest
) -> _TrainerPlan:
    """Keep the live trainer when it is where the workflow is, or one lost report ahead."""
    if not request.resume_exactly:
        facts = await _settled_trainer(fleet, token)
        wanted = (request.next_update, request.next_update + 1)
        if facts is not None and facts.next_update in wanted:
            return _TrainerPlan(kept=facts)
    if request.checkpoint is None:
        return _TrainerPlan(kept=None)
    marker = await asyncio.to_thread(verify_checkpoint, fleet.store, request.checkpoint)
    return _TrainerPlan(kept=None, folder=request.checkpoint.folder, clock=marker.clock)


async def _settled_trainer(fleet: RunFleet, token: FenceToken) -> ActorFacts | None:
    """The live trainer once no older call can move it any more; None when none can be kept.

    Calls of older epochs that wait are refused from now on; one that runs is awaited, because
    whether its update counts decides where the data goes on.
    """
    facts = await fleet.facts("trainer")
    if facts is None or not fleet.belongs(facts):
        return None
    trainer = fleet.actor("trainer")
    try:
        await trainer.call("revoke", token.epoch - 1)
        facts = await trainer.call("settled", timeout_s=await fleet.startup_timeout_s())
    except (ActorLost, ServiceUnreachable):
        return None
    return facts if fleet.belongs(facts) else None


async def _keep_producer(fleet: RunFleet, token: FenceToken) -> bool:
    """Whether the live producer goes on: then older epochs are refused and their stages end."""
    facts = await fleet.facts("producer")
    if facts is None or not fleet.belongs(facts):
        return False
    try:
        await fleet.actor("producer").call("revoke", token.epoch - 1)
    except (ActorLost, ServiceUnreachable):
        return False
    return True


async def _bring_up(
    fleet: RunFleet,
    engines: Engines,
    router: Router,
    token: FenceToken,
    request: PrepareRequest,
    prepared: PreparedRun,
    plan: _TrainerPlan,
    keep_producer: bool,
) -> tuple[ActorFacts, tuple[str, ...]]:
    """Start what is missing, all at once; return the trainer's facts and what was started."""
    started: asyncio.Future[ActorFacts] = asyncio.get_running_loop().create_future()

    async def trainer() -> ActorFacts:
        facts = plan.kept or await _start_trainer(fleet, token, plan)
        started.set_result(facts)
        return facts

    async def all_engines() -> Ensured:
        if (await fleet.spec()).gpu_demand is not None:
            # It needs all its GPUs on one node, and colocated engines find out which it has and
            # what memory it leaves.
            await started
        return await engines.ensure()

    async def producer() -> None:
        if not keep_producer:
            state = await asyncio.to_thread(data_position, fleet.store, request, plan.kept)
            await _start_producer(fleet, token, prepared, state)

    facts, ensured, fresh_router, _ = await together(
        (trainer(), all_engines(), router.ensure(), producer())
    )
    if keep_producer:
        kept: tuple[str, ...] = ()
        if not await router.wanted():
            kept = tuple(each.url for each in ensured.live if each not in ensured.fresh)
        await fleet.actor("producer").call("set_engines", token, kept)
    rebuilt = (
        *(() if plan.kept else ("trainer",)),
        *(engine.name for engine in ensured.fresh),
        *(() if fresh_router is None else ("router",)),
        *(() if keep_producer else ("producer",)),
    )
    return facts, rebuilt


async def _start_trainer(fleet: RunFleet, token: FenceToken, plan: _TrainerPlan) -> ActorFacts:
    timeout_s = await fleet.startup_timeout_s()
    spec = await fleet.spec()
    group = await place(
        *(fleet.cluster, fleet.run.run_id, "trainer", (trainer_bundle(spec),), timeout_s),
        beside=engine_bundles(spec),
    )
    from workers.actors.trainer import CONCURRENCY_GROUPS, TrainerActor  # imports Ray

    demand = spec.gpu_demand
    options = in_bundle(group, 0, 0 if demand is None else demand.trainer)
    groups = {"concurrency_groups": CONCURRENCY_GROUPS}
    actor = await fleet.create("trainer", 0, TrainerActor, options, groups)
    facts: ActorFacts = await actor.call(
        "start",
        *(token.epoch, plan.folder, plan.clock),
        timeout_s=timeout_s + await fleet.download_timeout_s(),
    )
    await fleet.remember(facts.status)
    _log.info("trainer started", run=fleet.run.run_id, next_update=facts.next_update)
    return facts


async def _start_producer(
    fleet: RunFleet, token: FenceToken, prepared: PreparedRun, state: DataState
) -> None:
    actor = await fleet.create("producer", 0, ProducerActor, {"num_cpus": PRODUCER_CPUS})
    timeout_s = await fleet.startup_timeout_s() + await fleet.download_timeout_s()
    facts: ActorFacts = await actor.call("start", token.epoch, prepared, state, timeout_s=timeout_s)
    await fleet.remember(facts.status)
    _log.info("producer started", run=fleet.run.run_id, pending=len(state.pending))


def data_position(store: Store, request: PrepareRequest, trainer: ActorFacts | None) -> DataState:
    """Where a new producer begins: after what the kept ``trainer`` trained last, or at the start.

    Without a kept trainer it begins where the checkpoint's trainer stands.

    Raises:
        ContractViolation: the trainer trained a collection of which no manifest is left.
        DigestMismatch: the checkpoint's cursor is damaged.
    """
    checkpoint = request.checkpoint
    if trainer is None:
        return DataState() if checkpoint is None else read_cursor(store, checkpoint)
    consumed = (trainer.next_update or 0) - 1
    if consumed < 0:
        return DataState()
    manifests = _manifests(store, consumed)
    for manifest in manifests:
        if manifest.collection.sha256 == trainer.last_batch_sha256:
            return manifest.data_after
    if checkpoint is not None and checkpoint.update == consumed:
        return read_cursor(store, checkpoint)
    raise ContractViolation(
        f"the trainer has trained collection {trainer.last_batch_sha256} as update {consumed}, but "
        f"{store.root}/{layout.ROLLOUTS} holds no manifest of it ({len(manifests)} others)"
    )


def _manifests(store: Store, update: int) -> list[CollectionManifest]:
    """Manifests of the collection of ``update``, newest epoch first."""
    matches = (_MANIFEST.fullmatch(name) for name in store.list(layout.ROLLOUTS))
    epochs = sorted((int(m[2]) for m in matches if m and int(m[1]) == update), reverse=True)
    return [
        CollectionManifest.model_validate(
            store.read_json(layout.collection_manifest(update, epoch))
        )
        for epoch in epochs
    ]
