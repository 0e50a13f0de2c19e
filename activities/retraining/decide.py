"""``decide``: read what a firing's run left, judge it, record the decision, move the pointer."""

import time

import structlog

from activities.retraining.lineage import (
    append_record,
    digest_folder,
    point_to_newest,
    read_lineage,
)
from activities.retraining.plan import outcome_of, resolved_run, superseded
from activities.retraining.promotion import judge
from activities.storage import layout
from activities.storage.commit import newest_checkpoint
from activities.storage.store import Store
from models.errors import ContractViolation
from models.retraining import (
    METRICS,
    UNSCORED,
    Comparison,
    DecideRequest,
    Decision,
    FiringPlan,
    FolderDigest,
    LineageRecord,
    RetrainingOutcome,
    RetrainingRequest,
)
from models.run import RunState

_EVAL_DATA = layout.EVAL_JSONL.rpartition("/")[2]

_log = structlog.get_logger(__name__)


def decide(asked: DecideRequest) -> RetrainingOutcome:
    """Decide once: a repeated call finds the record and only sees to the pointer. Blocks.

    Raises:
        ContractViolation: the lineage is damaged.
        StorageFull: the record cannot be written.
    """
    plan = asked.plan
    store = Store(plan.root)
    while True:
        records = read_lineage(store)
        known = [each for each in records if each.firing == plan.name and each.decision.is_final]
        if known:
            point_to_newest(store)
            return outcome_of(known[-1])
        record = _record(asked, records)
        if append_record(store, record):
            point_to_newest(store)
            _log.info("firing decided", firing=plan.name, decision=record.decision.value)
            return outcome_of(record)


def _record(asked: DecideRequest, records: list[LineageRecord]) -> LineageRecord:
    plan, run = asked.plan, Store(asked.plan.run_root)
    failure = asked.error or _incomplete(run)
    export: FolderDigest | None = None
    comparison: Comparison | None = None
    parent = plan.parent
    decision, reason = Decision.FAILED, failure
    if not failure:
        comparison = _comparison(asked.request, plan, run)
        export = digest_folder(f"{run.root}/{resolved_run(plan).spec.output.hf_dir}")
        decision, reason = judge(comparison)
        if decision is Decision.PROMOTED and (stale := superseded(plan, records)):
            decision, reason = Decision.REFUSED, stale
        if not parent.digest:
            prepared = digest_folder(f"{run.root}/{layout.PREPARED_MODEL}")
            parent = parent.model_copy(update={"digest": prepared.digest})
    return LineageRecord(
        number=len(records) + 1,
        firing=plan.name,
        run_id=plan.run_id,
        run_root=plan.run_root,
        decision=decision,
        reason=reason,
        config_sha256=plan.training.config_sha256,
        data=plan.data,
        parent=parent,
        checkpoint=newest_checkpoint(run),
        export=export,
        comparison=comparison,
        recorded_unix=time.time(),
    )


def _incomplete(run: Store) -> str:
    """Why the run's root holds no finished run; empty when it does."""
    if not run.exists(layout.WORKFLOW_JSON):
        return f"{run.root} holds no run"
    state = run.read_json(layout.WORKFLOW_JSON)
    if state.get("status") == RunState.COMPLETE.value:
        return ""
    return f"the run is {state.get('status')}, not complete: {state.get('error', 'no error')}"


def _comparison(request: RetrainingRequest, plan: FiringPlan, run: Store) -> Comparison:
    updates = int(run.read_json(layout.WORKFLOW_JSON)["update"])
    rows = {
        row["update"]: row
        for row in run.read_jsonl(layout.METRICS).rows
        if row.get("kind") == "eval"
    }
    parent, candidate = rows.get(0, {}), rows.get(updates, {}) if updates else {}
    manifest = run.read_json(layout.MANIFEST_JSON)
    if manifest["inputs"].get("data.prompt_data") != plan.data.sha256:
        raise ContractViolation(f"{run.root} was trained on other data than {plan.data.path}")
    return Comparison(
        metric=request.metric,
        higher_is_better=METRICS[request.metric],
        tolerance=request.tolerance,
        parent=_number(parent, request.metric),
        candidate=_number(candidate, request.metric),
        samples=manifest["rows"]["eval"] * resolved_run(plan).spec.evaluation.samples_per_prompt,
        updates=updates,
        max_unscored_fraction=request.max_unscored_fraction,
        parent_unscored=_number(parent, UNSCORED),
        candidate_unscored=_number(candidate, UNSCORED),
        data_sha256=manifest["outputs"][_EVAL_DATA],
    )


def _number(row: dict[str, object], name: str) -> float | None:
    """A figure of an evaluation; one that is missing or null decides nothing."""
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else None
