"""How a run begins and ends on its output root: ``claim``, ``record``, ``revoke``."""

import asyncio
import os
import socket
import time
from typing import Any

import structlog
from temporalio import activity

from activities.multiplier import infra_timeout_multiplier
from activities.queues import fleet_queue
from activities.rewinding import plan_rewind, rewind_once, settle_rewinds
from activities.server import ServerFacts
from activities.site import Site, store_of
from activities.storage import layout
from activities.storage.commit import fence_off_commits, newest_checkpoint
from activities.storage.lease import Owner, claim_epoch, current_epoch, read_owner, revoke_epoch
from activities.storage.rewinds import has_unsettled, read_rewinds
from activities.storage.settled import is_settled
from activities.storage.store import Store, free_bytes
from configs.compare import differences, recorded_identity
from configs.load import Loaded, resolve_input
from configs.plan import build_plan, loop_plan
from models.checkpoint import Rewind, RewindRequest
from models.errors import ConfigurationError, StaleFence, StorageFull
from models.ids import RunRef
from models.run import ClaimResult, RecordRequest, RevokeRequest, RunProgress, RunRequest, RunState

MIN_FREE_BYTES = 256 << 20
"""Less than this under a local root and a run does not start: no checkpoint would fit."""

_log = structlog.get_logger(__name__)


async def claim(request: RunRequest, server: ServerFacts) -> ClaimResult:
    """Validate the run file, take its output root under a new epoch, find where to go on.

    The same workflow may claim again, after a lost actor or a lost answer: it gets a new epoch and
    adds no attempt. A refusal leaves ``workflow.json`` and ``attempts.json`` as they were.

    Raises:
        ConfigurationError: the run file is wrong, the root cannot be written, the run was started
            with another configuration, is complete, or may not be started again.
        OwnershipError: the root belongs to another run or server.
        StorageFull: too little space to start.
    """
    info = activity.info()
    workflow_id, workflow_run_id = info.workflow_id or "", info.workflow_run_id or ""
    loaded = _validated(request)
    owner = Owner(
        run_id=workflow_id,
        namespace=server.namespace,
        cluster_id=server.cluster_id,
        workflow_run_id=workflow_run_id,
        host=socket.gethostname(),
        pid=os.getpid(),
        address=server.address,
    )
    try:
        return await asyncio.to_thread(_claim, request, loaded, owner, server.search_attributes)
    except (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError) as error:
        raise ConfigurationError(
            f"output.root {loaded.spec.output.root!r} cannot be used: {error.strerror} "
            f"({error.filename}); choose a folder that this worker may write to"
        ) from error


def _validated(request: RunRequest) -> Loaded:
    remedy = "perdure config render RUN.toml"
    return resolve_input(request.config, request.config_sha256, request.config_path, remedy)


def _claim(request: RunRequest, loaded: Loaded, owner: Owner, attributes: bool) -> ClaimResult:
    store = Store(loaded.spec.output.root)
    _require_space(store)
    again = request.progress is not None and request.progress.run is not None
    holder = read_owner(store)
    if not again and (holder is None or request.take_over or holder.owner.same_run(owner)):
        rewinds = request.rewind is not None or has_unsettled(store)
        _check_identity(store, loaded, owner.workflow_run_id, rewinds=rewinds)
        if request.rewind is not None:
            _require_rewindable(store, request.rewind, owner.workflow_run_id)
    # A run that loses the root later was itself taken over from, and must not take it back.
    epoch = claim_epoch(store, owner, take_over=request.take_over and not again)
    fence_off_commits(store, epoch)
    attempt = request.progress.attempt if again and request.progress else 0
    plan = loop_plan(loaded.spec, infra_timeout_multiplier())
    run = RunRef(run_id=owner.run_id, root=store.root, spec_sha256=loaded.sha256)
    if again and request.progress and request.progress.run:
        run = request.progress.run  # what was recorded stays, whatever version goes on with it
    started_unix = time.time()
    rewind = request.progress.rewind if again and request.progress else None
    if not again:
        attempt = _register_attempt(store, loaded, owner.workflow_run_id, started_unix)
        if request.rewind is not None:
            rewind = rewind_once(store, request.rewind, epoch, owner.workflow_run_id)
        else:
            rewind = _standing_rewind(store)
        settle_rewinds(store, loaded.spec.output.hf_dir, epoch)
        store.write_json(layout.RESOLVED_CONFIG, loaded.document)
        store.write_json(layout.PLAN_JSON, build_plan(loaded))
    result = ClaimResult(
        run=run,
        epoch=epoch,
        plan=plan,
        fleet_queue=fleet_queue(loaded.spec.launch.fleet),
        attempt=attempt,
        checkpoint=newest_checkpoint(store),
        rewind=rewind,
        started_unix=started_unix,
        search_attributes=attributes,
    )
    if not again:
        progress = RunProgress(
            run=run,
            epoch=epoch,
            attempt=attempt,
            rewind=rewind,
            started_unix=started_unix,
            next_update=0 if result.checkpoint is None else result.checkpoint.update + 1,
        )
        _write_state(store, progress, owner.workflow_run_id)
    return result


def _require_space(store: Store) -> None:
    free = free_bytes(store.root)
    if free is not None and free < MIN_FREE_BYTES:
        raise StorageFull(
            f"output.root {store.root}: {free >> 20} MiB free, a run needs at least "
            f"{MIN_FREE_BYTES >> 20} MiB; free space or choose another output.root"
        )


def _check_identity(store: Store, loaded: Loaded, workflow_run_id: str, *, rewinds: bool) -> None:
    """Refuse a root whose run meant something else, is complete, or must not be continued.

    ``rewinds``: the run goes back to before its end, so a complete one may go on.
    """
    if not store.exists(layout.WORKFLOW_JSON):
        return
    if not store.exists(layout.RESOLVED_CONFIG):
        raise ConfigurationError(
            f"{store.root} has {layout.WORKFLOW_JSON} but no {layout.RESOLVED_CONFIG}: what ran "
            "there cannot be told; choose another output.root"
        )
    recorded = store.read_json(layout.RESOLVED_CONFIG)
    before = recorded_identity(recorded)
    # Before the first collection nothing depends on the run file that a new start would not redo.
    if before != loaded.identity and is_settled(store):
        raise ConfigurationError(
            f"the configuration changed: {store.root} was started with {before}, "
            f"{loaded.path} now means {loaded.identity} (different: "
            f"{differences(recorded, loaded)}); restore the run file, or choose another name and "
            "output.root for a new run"
        )
    state = store.read_json(layout.WORKFLOW_JSON)
    if state.get("status") == RunState.COMPLETE.value and not rewinds:
        raise ConfigurationError(
            f"{store.root} holds a complete run, which is never overwritten; choose another name "
            "and output.root"
        )
    if state.get("workflow_run_id") != workflow_run_id:
        _require_resumable(store, loaded, state.get("status"))


def require_another_start(store: Store, loaded: Loaded) -> None:
    """Refuse what a claim would refuse by ``loaded``'s ``launch``, before a run is ended for it.

    Args:
        store: the root, which holds a run.
        loaded: the run file that the run is to go on with.

    Raises:
        ConfigurationError: see the message.
    """
    if store.exists(layout.WORKFLOW_JSON):
        _require_resumable(store, loaded, store.read_json(layout.WORKFLOW_JSON).get("status"))
    _require_attempts_left(store, loaded, _attempts(store))


def _require_resumable(store: Store, loaded: Loaded, status: Any) -> None:
    if not loaded.spec.launch.auto_resume:
        raise ConfigurationError(
            f"{store.root} holds a run in state {status} and launch.auto_resume is "
            "false; set it to true to continue, or choose another output.root"
        )


def _require_rewindable(store: Store, request: RewindRequest, workflow_run_id: str) -> None:
    """Refuse an impossible rewind before anything is claimed; one that is recorded is possible."""
    if all(each.workflow_run_id != workflow_run_id for each in read_rewinds(store)):
        plan_rewind(store, request, current_epoch(store) + 1, workflow_run_id)


def _register_attempt(
    store: Store, loaded: Loaded, workflow_run_id: str, started_unix: float
) -> int:
    """Index of this start in ``attempts.json``; a repeated claim finds its own row."""
    rows = _attempts(store)
    if rows and rows[-1].get("workflow_run_id") == workflow_run_id:
        return int(rows[-1]["attempt"])
    _require_attempts_left(store, loaded, rows)
    row = {"attempt": len(rows), "started_unix": started_unix, "workflow_run_id": workflow_run_id}
    store.write_json(layout.ATTEMPTS_JSON, [*rows, row])
    return len(rows)


def _standing_rewind(store: Store) -> Rewind | None:
    """The last rewind while its checkpoint is the newest: what it undid may live on in the fleet.

    The start that rewound may have ended before it prepared anything.
    """
    rewinds = read_rewinds(store)
    newest = newest_checkpoint(store) if rewinds else None
    is_there = newest is not None and newest.folder == rewinds[-1].checkpoint.folder
    return rewinds[-1] if is_there else None


def _attempts(store: Store) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    if store.exists(layout.ATTEMPTS_JSON):
        rows = store.read_json(layout.ATTEMPTS_JSON)
    return rows


def _require_attempts_left(store: Store, loaded: Loaded, rows: list[dict[str, Any]]) -> None:
    limit = loaded.spec.launch.max_retries
    if 0 <= limit < len(rows):
        raise ConfigurationError(
            f"{store.root} was started {len(rows)} times and launch.max_retries is {limit}; raise "
            "it to continue this run"
        )


async def record(request: RecordRequest) -> None:
    """Write ``workflow.json``. Raises ``StaleFence`` when a newer claim owns the root."""
    progress = request.progress
    if progress.run is None:
        raise ConfigurationError("record was called before claim: progress has no run")
    workflow_run_id = activity.info().workflow_run_id or ""
    await asyncio.to_thread(_record, store_of(progress.run), progress, workflow_run_id)


def _record(store: Store, progress: RunProgress, workflow_run_id: str) -> None:
    # A revoked epoch may still record how it ended; a newer one may have started since.
    newest = current_epoch(store)
    if newest > progress.epoch:
        raise StaleFence(
            f"{store.root}: workflow.json of epoch {progress.epoch} refused, epoch {newest} owns it"
        )
    _write_state(store, progress, workflow_run_id)


def _write_state(store: Store, progress: RunProgress, workflow_run_id: str) -> None:
    run = progress.run
    state: dict[str, Any] = {
        "about": "written for offline readers; Temporal's workflow is the truth about this run",
        "run_id": run.run_id if run else "",
        "workflow_run_id": workflow_run_id,
        "spec_sha256": run.spec_sha256 if run else "",
        "status": progress.state.value,
        "attempt": progress.attempt,
        "epoch": progress.epoch,
        "update": progress.next_update,
        "started_unix": progress.started_unix,
    }
    if progress.training_started_unix is not None:
        state["training_started_unix"] = progress.training_started_unix
    if progress.finished_unix is not None:
        state["finished_unix"] = progress.finished_unix
    if progress.error is not None:
        state["error"] = f"{progress.error_type}: {progress.error}"
    elif progress.state.is_terminal:
        state["result"] = {
            "completed_rollout_ids": list(range(progress.first_update, progress.next_update)),
            "start_rollout_id": progress.first_update,
            "export_hf": progress.export_uri,
            "stopped_for_time": progress.stopped_for_time,
        }
    store.write_json(layout.WORKFLOW_JSON, state)


async def revoke(request: RevokeRequest, site: Site | None) -> None:
    """End ``request.epoch`` on the root, then in every component, then tear the fleet down.

    Without a ``site`` (a worker that reaches no fleet) only the root's epoch is revoked; that
    alone keeps zombies from committing anything.
    """
    store = store_of(request.run)
    try:
        await asyncio.to_thread(revoke_epoch, store, request.epoch)
    finally:
        # A root that takes no more files must not keep the fleet alive.
        if site is not None:
            await _revoke_fleet(site, request)


async def _revoke_fleet(site: Site, request: RevokeRequest) -> None:
    try:
        await site.fleet.revoke(request.run, request.epoch)
        if request.completed:
            await site.fleet.publish_caches(request.run)
    finally:
        # A component that cannot be told is ended all the same.
        if request.teardown:
            await site.fleet.teardown(request.run)
