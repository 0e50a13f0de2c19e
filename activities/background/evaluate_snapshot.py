"""``evaluate_snapshot``: one snapshot on an engine of its own, results under the output root.

The folder of results holds ``provenance.json`` (the inputs), ``samples.parquet``, ``scores.json``
and ``evaluation.json``. A repeated call with the same inputs answers from them; other inputs are
refused. Results stand before any tracker is told of them.
"""

import asyncio
import hashlib
import time
from typing import Any

import structlog
from pydantic import ValidationError

from activities.background.experiments import Experiments
from activities.background.receipts import (
    COMPLETE,
    FAILED,
    change_receipt,
    evaluation_tasks,
    read_receipt,
)
from activities.background.snapshot import prune_snapshots
from activities.heartbeat import beating
from activities.rows import append_metrics, eval_metrics, eval_samples
from activities.site import Site, spec_of, store_of
from activities.storage import layout
from activities.storage.store import Store
from models.background import BackgroundOrder, EvaluationFailure
from models.errors import ActorLost, ConfigurationError, ContractViolation, ServiceUnreachable
from models.evaluation import EvaluationReport, ReceiptStatus
from models.ports import EvaluatorPort, OpenEvaluator, StageProgress

_log = structlog.get_logger(__name__)


async def evaluate_snapshot(
    site: Site, open_evaluator: OpenEvaluator, order: BackgroundOrder
) -> EvaluationReport:
    """Evaluate ``order.snapshot`` and write results, metric rows and the receipt's result.

    Raises:
        ServiceUnreachable: the evaluator or its engine died; another attempt may succeed.
        ConfigurationError: the snapshot is gone.
        ContractViolation: the folder of results answers for other inputs.
    """
    evaluation = _Evaluation(site, open_evaluator, order)
    return await beating(
        evaluation.run(), f"evaluate snapshot {order.snapshot.update}", evaluation.progress
    )


async def await_evaluation(order: BackgroundOrder, experiments: Experiments) -> None:
    """Return when the evaluation before this one does not run any more."""
    if order.after is not None:
        await beating(experiments.closed(order.after), f"wait for {order.after}")


async def record_evaluation(failure: EvaluationFailure) -> None:
    """Write that an evaluation failed for good."""
    await asyncio.to_thread(_write_failure, store_of(failure.order.run), failure)


class _Evaluation:
    """One attempt. Heartbeats cover all of it: an evaluator takes seconds to start."""

    def __init__(self, site: Site, open_evaluator: OpenEvaluator, order: BackgroundOrder) -> None:
        self._site = site
        self._open = open_evaluator
        self._order = order
        self._store = store_of(order.run)
        self._evaluator: EvaluatorPort | None = None

    async def progress(self) -> StageProgress:
        """The evaluator's own, once there is one."""
        if self._evaluator is not None:
            return await self._evaluator.progress()
        return StageProgress(stage=f"evaluate snapshot {self._order.snapshot.update}")

    async def run(self) -> EvaluationReport:
        """Evaluate, or find that done; then tell everybody."""
        store, order = self._store, self._order
        spec = await asyncio.to_thread(spec_of, order.run)
        await asyncio.to_thread(
            change_receipt, store, order.receipt, status=ReceiptStatus.SUBMITTED, error=None
        )
        provenance = await asyncio.to_thread(_provenance, store, order, evaluation_tasks(spec))
        report = await asyncio.to_thread(_finished, store, order, provenance)
        if report is None:
            report = await self._evaluate()
            await asyncio.to_thread(_write_results, store, order, report, provenance)
        await _publish(self._site, store, order, report)
        removed = await asyncio.to_thread(prune_snapshots, store)
        reward = report.reward_mean
        _log.info("snapshot evaluated", receipt=order.receipt, reward=reward, gone=removed)
        return report

    async def _evaluate(self) -> EvaluationReport:
        snapshot = self._order.snapshot
        marker = f"{snapshot.folder}/{layout.SNAPSHOT_COMPLETE}"
        if snapshot.update and not await asyncio.to_thread(self._store.exists, marker):
            raise ConfigurationError(
                f"{self._store.root}/{snapshot.folder} is not a complete snapshot any more; "
                "nothing is left to evaluate after this update"
            )
        try:
            async with self._open(self._order) as evaluator:
                self._evaluator = evaluator
                return await evaluator.evaluate()
        except ActorLost as error:
            raise ServiceUnreachable(error.message) from error
        finally:
            self._evaluator = None


def _provenance(
    store: Store, order: BackgroundOrder, tasks: tuple[dict[str, Any], ...]
) -> dict[str, Any]:
    """The inputs of the evaluation; written once, compared ever after."""
    held_out = store.sha256(layout.EVAL_JSONL)
    inputs = {
        "schema_version": 1,
        "update": order.snapshot.update,
        "policy_version": order.snapshot.policy_version,
        "snapshot_digest": order.snapshot.digest,
        "eval_sha256": held_out,
        "result_key": hashlib.sha256(f"{order.snapshot.digest} {held_out}".encode()).hexdigest(),
        "tasks": list(tasks),
    }
    rel = f"{layout.eval_results(order.receipt)}/{layout.EVAL_PROVENANCE}"
    if not store.exists(rel):
        store.write_json(rel, inputs)
        return inputs
    recorded = store.read_json(rel)
    if recorded != inputs:
        different = sorted(name for name in inputs if recorded.get(name) != inputs[name])
        raise ContractViolation(
            f"{store.root}/{rel} answers for other inputs ({', '.join(different)}); resubmit the "
            "receipt to get a folder of its own"
        )
    return inputs


def _finished(
    store: Store, order: BackgroundOrder, provenance: dict[str, Any]
) -> EvaluationReport | None:
    """The report of an earlier attempt whose answer was lost."""
    rel = f"{layout.eval_results(order.receipt)}/{layout.EVAL_STATE}"
    if not store.exists(rel):
        return None
    state = store.read_json(rel)
    if state.get("status") != COMPLETE or state.get("result_key") != provenance["result_key"]:
        return None
    try:
        return EvaluationReport.model_validate(state["report"])
    except (ValidationError, KeyError) as error:
        raise ContractViolation(f"{store.root}/{rel} holds no report: {error}") from error


def _write_results(
    store: Store, order: BackgroundOrder, report: EvaluationReport, provenance: dict[str, Any]
) -> None:
    folder = layout.eval_results(order.receipt)
    scores = {
        "update": report.update,
        "policy_version": report.policy_version,
        "result_key": provenance["result_key"],
        "prompts": report.prompts,
        "samples": report.samples,
        "scores": eval_metrics(report),
    }
    store.write_json(f"{folder}/{layout.EVAL_SCORES}", scores)
    store.write_json(f"{folder}/{layout.EVAL_PUBLICATION}", {"status": "deferred"})
    state = {
        "status": COMPLETE,
        "result_key": provenance["result_key"],
        "finished_unix": time.time(),
        "report": report.model_dump(mode="json"),
    }
    store.write_json(f"{folder}/{layout.EVAL_STATE}", state)


async def _publish(
    site: Site, store: Store, order: BackgroundOrder, report: EvaluationReport
) -> None:
    """Metric row, tracker, receipt: in this order, and each again when an attempt broke off."""
    folder = layout.eval_results(order.receipt)
    metrics = {**eval_metrics(report), "eval/checkpoint_update": float(report.update)}
    publication = f"{folder}/{layout.EVAL_PUBLICATION}"
    told = await asyncio.to_thread(store.read_json, publication)
    if told.get("status") != "published":
        names = eval_samples(report)
        await asyncio.to_thread(append_metrics, store, "eval", report.update, metrics, names)
        site.tracker.log(order.run, metrics)
        await asyncio.to_thread(store.write_json, publication, {"status": "published"})
    result = {"status": COMPLETE, "folder": folder, "reward": report.reward_mean}
    await asyncio.to_thread(change_receipt, store, order.receipt, result=result)


def _write_failure(store: Store, failure: EvaluationFailure) -> None:
    receipt_path = failure.order.receipt
    folder = layout.eval_results(receipt_path)
    if (read_receipt(store, receipt_path).result or {}).get("status") == COMPLETE:
        return
    error = f"{failure.error_type}: {failure.error}"
    state = {"status": FAILED, "error": error, "finished_unix": time.time()}
    store.write_json(f"{folder}/{layout.EVAL_STATE}", state)
    result = {"status": FAILED, "folder": folder, "error": error}
    change_receipt(store, receipt_path, status=ReceiptStatus.SUBMITTED, result=result)
