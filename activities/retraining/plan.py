"""``plan_firing``: what a firing trains on and from, fixed in a file before anything expensive."""

import hashlib
import re

import structlog

from activities.retraining.data import CheckRows, choose
from activities.retraining.lineage import (
    digest_folder,
    newest_promotion,
    point_to_newest,
    read_lineage,
)
from activities.storage import layout
from activities.storage.store import Store
from configs.load import Loaded, resolve_document
from configs.render import run_request
from configs.retraining import request_sha256, require_usable, run_of_firing
from models.errors import ConfigurationError, ContractViolation, DigestMismatch
from models.retraining import (
    DataChoice,
    Decision,
    Firing,
    FiringPlan,
    FiringRequest,
    LineageRecord,
    Parent,
    RetrainingOutcome,
    RetrainingRequest,
)
from models.run import RunRequest, RunState

PREFIX = "retrain/"
_MAX_NAME = 120
_FIRED_AT = re.compile(r"T(\d\d):(\d\d):(\d\d)Z$")
"""How Temporal ends the workflow ids of a schedule's firings."""
_COMPACT = re.compile(r"T\d{6}Z$")
_DATA = "train.jsonl"

_log = structlog.get_logger(__name__)


def plan_firing(firing: FiringRequest, check_rows: CheckRows) -> Firing:
    """What the firing does. Blocks. Repeated, it answers the same, also after its run.

    Raises:
        ConfigurationError: request or run file are wrong, a data file holds something else than
            rows, or the firing was planned before from another request.
        DigestMismatch: the export of the last promotion is not what was promoted.
        ServiceUnreachable: the storage of the data did not answer.
    """
    request = firing.request
    loaded = require_usable(request)
    store = Store(loaded.spec.output.root)
    name = firing_name(firing.workflow_id)
    point_to_newest(store)
    records = read_lineage(store)
    decided = [each for each in records if each.firing == name and each.decision.is_final]
    if decided:
        return Firing(outcome=outcome_of(decided[-1]))
    plan = _planned(store, name, request)
    if plan is not None:
        return _again(plan, records)
    chosen = choose(request.data, records, loaded.spec.data.verifier, check_rows)
    if not chosen.files:
        outcome = RetrainingOutcome(
            firing=name, decision=Decision.NOTHING_TO_DO, reason=chosen.reason
        )
        return Firing(outcome=outcome)
    parent = _parent(loaded, records)
    rel = layout.firing_file(name, _DATA)
    store.write_bytes(rel, chosen.content)
    data = DataChoice(
        path=f"{store.root}/{rel}",
        sha256=hashlib.sha256(chosen.content).hexdigest(),
        rows=sum(file.rows for file in chosen.files),
        files=chosen.files,
    )
    plan = _plan(store, loaded, request, name, data, parent)
    store.write_json(layout.firing_file(name, layout.FIRING_PLAN), plan.model_dump(mode="json"))
    _log.info("firing planned", firing=name, rows=data.rows, parent=parent.source)
    return Firing(plan=plan)


def firing_name(workflow_id: str) -> str:
    """A run's name that this workflow id alone leads to: of a schedule's firing, without colons."""
    text = workflow_id.removeprefix(PREFIX)
    plain = _FIRED_AT.sub(r"T\1\2\3Z", text)
    is_plain = plain != text or not _COMPACT.search(text)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", plain).lstrip("._-")
    if name == plain and is_plain and len(name) <= _MAX_NAME:
        return name
    mark = hashlib.sha256(workflow_id.encode()).hexdigest()[:8]
    return f"{name[: _MAX_NAME - 9] or 'firing'}-{mark}"


def outcome_of(record: LineageRecord) -> RetrainingOutcome:
    """A recorded decision as the workflow's result."""
    promoted = record.decision is Decision.PROMOTED
    return RetrainingOutcome(
        firing=record.firing,
        decision=record.decision,
        reason=record.reason,
        run_id=record.run_id,
        record=record.number,
        export=record.export.path if promoted and record.export else "",
        comparison=record.comparison,
    )


def _planned(store: Store, name: str, request: RetrainingRequest) -> FiringPlan | None:
    path = layout.firing_file(name, layout.FIRING_PLAN)
    if not store.exists(path):
        return None
    plan = FiringPlan.model_validate(store.read_json(path))
    if plan.request_sha256 != request_sha256(request):
        raise ConfigurationError(
            f"{store.root}/{path} was planned from another request: {plan.request_sha256} then, "
            f"{request_sha256(request)} now; trigger the schedule for a new firing"
        )
    if store.sha256(layout.firing_file(name, _DATA)) != plan.data.sha256:
        raise DigestMismatch(f"{plan.data.path} is not what was chosen; restore it")
    return plan


def _again(plan: FiringPlan, records: list[LineageRecord]) -> Firing:
    """A firing that was planned before: trained or not, its parent is still the one to beat."""
    run = Store(plan.run_root)
    trained = run.exists(layout.WORKFLOW_JSON) and (
        run.read_json(layout.WORKFLOW_JSON).get("status") == RunState.COMPLETE.value
    )
    reason = superseded(plan, records)
    if reason and not trained:
        outcome = RetrainingOutcome(
            firing=plan.name, decision=Decision.NOTHING_TO_DO, reason=reason
        )
        return Firing(outcome=outcome)
    return Firing(plan=plan, is_trained=trained)


def superseded(plan: FiringPlan, records: list[LineageRecord]) -> str:
    """Why the plan's parent is not the one to compare with any more; empty while it is."""
    newest = newest_promotion(records)
    number = newest.number if newest is not None else 0
    if number == plan.parent.record:
        return ""
    return (
        f"record {number} was promoted since this firing took record {plan.parent.record} as its "
        "parent; what it trained was never compared with the newer one"
    )


def _parent(loaded: Loaded, records: list[LineageRecord]) -> Parent:
    newest = newest_promotion(records)
    if newest is None:
        return Parent(source=loaded.spec.model.source)
    if newest.export is None:
        raise ContractViolation(f"record {newest.number} promotes nothing: it has no export")
    found = digest_folder(newest.export.path)
    if found.digest != newest.export.digest:
        raise DigestMismatch(
            f"{found.path} has digest {found.digest}, promoted was {newest.export.digest}; "
            "restore it"
        )
    return Parent(
        source=found.path, digest=found.digest, run_id=newest.run_id, record=newest.number
    )


def _plan(
    store: Store,
    loaded: Loaded,
    request: RetrainingRequest,
    name: str,
    data: DataChoice,
    parent: Parent,
) -> FiringPlan:
    root = f"{store.root}/{layout.firing_run(name)}"
    run = run_of_firing(loaded, name=name, root=root, model=parent.source, data=data.path)
    return FiringPlan(
        name=name,
        root=store.root,
        run_root=root,
        data=data,
        parent=parent,
        request_sha256=request_sha256(request),
        num_rollouts=run.spec.training.num_rollouts,
        timeout_s=run.spec.launch.timeout_s,
        identity_sha256=run.identity,
        training=RunRequest(**run_request(run)),
    )


def resolved_run(plan: FiringPlan) -> Loaded:
    """The run file of the firing's run."""
    return resolve_document(plan.training.config, origin=plan.name)
