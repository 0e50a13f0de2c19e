"""Submitting a background evaluation: claim its receipt once, and record how that ended.

    claimed -> pending -> submitted | submission_failed
    claimed -> skipped_busy

A receipt that exists is never claimed again. One that stopped at claimed or pending is taken up:
its workflow id was fixed when it was claimed, and Temporal starts an id once.
"""

import asyncio
import secrets
from typing import Any

import structlog

from activities.background.experiments import Experiments
from activities.background.receipts import (
    OPEN,
    change_receipt,
    encoded,
    evaluation_key,
    evaluation_tasks,
    read_receipt,
    receipts,
)
from activities.site import spec_of, store_of
from activities.storage import layout
from activities.storage.lease import require_epoch
from activities.storage.store import Store
from configs.plan import loop_plan
from configs.run import RunSpec
from models.background import (
    BackgroundOrder,
    EvaluationClaim,
    EvaluationReceipt,
    SnapshotRef,
    SubmissionRecord,
    SubmitRequest,
)
from models.evaluation import EvaluationSubmission, ReceiptStatus
from models.ids import RunRef

FINAL = "final"
_UNSETTLED = (ReceiptStatus.CLAIMED, ReceiptStatus.PENDING)
_log = structlog.get_logger(__name__)


async def submit_evaluation(
    request: SubmitRequest, experiments: Experiments, code_sha256: str, multiplier: float
) -> EvaluationClaim:
    """Claim the receipt of ``request``; the answer holds an order when it is to be started now.

    A periodic or initial evaluation is skipped while the one before it runs; the final one gets an
    order that waits for it.

    Raises:
        StaleFence: the epoch does not own the root any more.
        ServiceUnreachable: Temporal did not answer.
    """
    store = store_of(request.run)
    spec = await asyncio.to_thread(spec_of, request.run)
    receipt_path = layout.eval_receipt(
        request.snapshot.update, evaluation_key(evaluation_tasks(spec))
    )
    await asyncio.to_thread(require_epoch, store, request.epoch)
    receipt, is_mine = await asyncio.to_thread(_claim, store, receipt_path, request)
    if not is_mine:
        if receipt.status not in _UNSETTLED:
            _log.info("evaluated already", receipt=receipt_path, status=receipt.status)
            return _answer(request, receipt_path, receipt)
        if await experiments.is_open(receipt.experiment_id) is not None:
            receipt = await asyncio.to_thread(
                change_receipt, store, receipt_path, status=ReceiptStatus.SUBMITTED
            )
            return _answer(request, receipt_path, receipt)
    before = await _running(store, receipt_path, experiments)
    skipped = before is not None and request.phase != FINAL
    whole = _filled(
        spec, request.run, request.snapshot, request.phase, receipt, code_sha256
    ).model_copy(
        update={"status": ReceiptStatus.SKIPPED_BUSY if skipped else ReceiptStatus.PENDING}
    )
    await asyncio.to_thread(store.write_bytes, receipt_path, encoded(whole))
    order = None if skipped else order_of(spec, receipt_path, whole, before, multiplier)
    return _answer(request, receipt_path, whole, order)


async def record_submission(request: SubmissionRecord, code_sha256: str) -> None:
    """Write how a submission ended. What the evaluation itself wrote meanwhile wins.

    A receipt that was claimed and never filled is filled now, so that it can be submitted again.
    """
    spec = await asyncio.to_thread(spec_of, request.run)
    await asyncio.to_thread(_record, request, spec, code_sha256)


def order_of(
    spec: RunSpec,
    receipt_path: str,
    receipt: EvaluationReceipt,
    after: str | None,
    multiplier: float,
) -> BackgroundOrder:
    """The input of the workflow that ``receipt`` asks for; it must name a snapshot and a run."""
    snapshot = receipt.snapshot
    if snapshot is None:
        raise ValueError(f"{receipt_path} names no snapshot")
    training = receipt.training
    return BackgroundOrder(
        run=RunRef(
            run_id=training["run_id"], root=training["root"], spec_sha256=training["spec_sha256"]
        ),
        receipt=receipt_path,
        experiment_id=receipt.experiment_id,
        phase=receipt.phase,
        snapshot=snapshot,
        after=after,
        timeout_s=spec.evaluation.timeout_s,
        plan=loop_plan(spec, multiplier),
    )


def new_experiment_id(run_id: str, receipt_path: str) -> str:
    """Workflow id of a new evaluation: run, receipt, and a part of its own.

    Without the latter a run that starts over in an emptied root would meet its former self's.
    """
    name = receipt_path.rpartition("/")[2].removesuffix(".json")
    return f"{run_id}/evaluation/{name}.{secrets.token_hex(4)}"


def _claim(store: Store, rel: str, request: SubmitRequest) -> tuple[EvaluationReceipt, bool]:
    """The receipt, and whether this call created it."""
    claimed = EvaluationReceipt(
        update=request.snapshot.update,
        status=ReceiptStatus.CLAIMED,
        experiment_id=new_experiment_id(request.run.run_id, rel),
    )
    if store.create_exclusive(rel, encoded(claimed)):
        return claimed, True
    return read_receipt(store, rel), False


def _filled(
    spec: RunSpec,
    run: RunRef,
    snapshot: SnapshotRef,
    phase: str,
    receipt: EvaluationReceipt,
    code_sha256: str,
) -> EvaluationReceipt:
    """The claimed receipt with all that it says about run, snapshot and settings."""
    tasks = evaluation_tasks(spec)
    facts: dict[str, Any] = {
        "checkpoint": f"{run.root.rstrip('/')}/{snapshot.folder}",
        "tasks": tasks,
        "group_id": evaluation_key(tasks),
        "evaluation": spec.evaluation.model_dump(mode="json"),
        "training": {"name": spec.name, **run.model_dump(mode="json")},
        "code_sha256": code_sha256,
        "phase": phase,
        "snapshot": snapshot,
    }
    return receipt.model_copy(update=facts)


async def _running(store: Store, own: str, experiments: Experiments) -> str | None:
    """Id of the newest other evaluation of this root that still runs."""
    found = await asyncio.to_thread(lambda: list(receipts(store)))
    for rel, receipt in reversed(found):
        unsettled = receipt.status in OPEN and receipt.result is None
        if rel != own and unsettled and await experiments.is_open(receipt.experiment_id):
            return receipt.experiment_id
    return None


def _answer(
    request: SubmitRequest,
    receipt_path: str,
    receipt: EvaluationReceipt,
    order: BackgroundOrder | None = None,
) -> EvaluationClaim:
    return EvaluationClaim(
        submission=EvaluationSubmission(
            update=request.snapshot.update,
            phase=request.phase,
            status=receipt.status,
            receipt=receipt_path,
            experiment_id=receipt.experiment_id,
        ),
        order=order,
    )


def _record(request: SubmissionRecord, spec: RunSpec, code_sha256: str) -> None:
    store, submission = store_of(request.run), request.submission
    rel = submission.receipt or layout.eval_receipt(
        submission.update, evaluation_key(evaluation_tasks(spec))
    )
    error = {"type": submission.error_type, "message": submission.error}
    changes: dict[str, Any] = {
        "status": submission.status,
        "error": error if submission.error_type else None,
    }

    def ended(receipt: EvaluationReceipt) -> EvaluationReceipt:
        if receipt.snapshot is None and request.snapshot is not None:
            receipt = _filled(
                spec, request.run, request.snapshot, submission.phase, receipt, code_sha256
            )
        return receipt.model_copy(update=changes)

    fresh = EvaluationReceipt(update=submission.update, phase=submission.phase, **changes)
    if store.create_exclusive(rel, encoded(ended(fresh))):
        return
    found = read_receipt(store, rel)
    if found.status in _UNSETTLED:
        store.write_bytes(rel, encoded(ended(found)))
