"""Rows that people and tools read: ``metrics.jsonl``, ``updates.jsonl``, ``publication.jsonl``."""

import math
import time
from collections.abc import Mapping
from typing import Any

from activities.storage import layout
from activities.storage.store import Store
from models.errors import ContractViolation
from models.evaluation import EvaluationReport
from models.metrics import refuse_undeclared
from models.rollout import RolloutCollection
from models.update import UpdateReport


def rollout_metrics(collection: RolloutCollection) -> dict[str, float]:
    """The row of a consumed collection: what it reports, completed by what its counts say."""
    counts = collection.counts
    samples = max(counts.samples, 1)
    derived = {
        "rollout/reward": collection.reward_mean,
        "rollout/response_len/mean": counts.response_tokens / samples,
        "rollout/truncated_ratio": counts.truncated_samples / samples,
        "rollout/mixed_reward_groups": counts.mixed_reward_groups,
        "rollout/invalid_verdicts": counts.invalid_verdicts,
        "rollout/requeued_groups": sum(counts.failed_attempts.values()),
        "rollout/seconds": collection.seconds,
        "rollout/response_tokens_per_second": counts.response_tokens
        / max(collection.seconds, 1e-9),
        "rollout/weight_version/min": collection.min_version,
        "rollout/weight_version/max": collection.max_version,
    }
    return {**derived, **collection.metrics, "rollout/step": collection.update}


def train_metrics(report: UpdateReport, collection: RolloutCollection) -> dict[str, float]:
    """The row of a finished update. Its lag counts from the version before its own steps."""
    before = report.policy_version - report.optimizer_steps
    derived = {
        "train/completed_steps": report.policy_version,
        "train/rollout_id": report.update,
        "train/optimizer_steps": report.optimizer_steps,
        "train/no_signal": float(report.no_signal),
        "train/step_seconds": report.seconds,
        "train/resident_bytes": report.resident_bytes,
        "train/lag": before - collection.min_version,
    }
    return {**derived, **report.metrics, "train/step": max(0, report.policy_version - 1)}


def eval_metrics(report: EvaluationReport) -> dict[str, float]:
    """The row of an evaluation: the mean reward under its name, and its side figures."""
    return {
        f"eval/{report.name}": report.reward_mean,
        **report.metrics,
        "eval/step": report.update,
    }


def eval_samples(report: EvaluationReport) -> dict[str, str]:
    """Which file the row of an evaluation speaks of, and its digest where one was taken."""
    digest = {"sha256": report.sha256} if report.sha256 else {}
    return {"uri": report.uri, **digest}


def append_metrics(
    store: Store,
    kind: str,
    update: int,
    metrics: Mapping[str, float],
    names: Mapping[str, str] | None = None,
) -> None:
    """Append one row to ``metrics.jsonl``. A retry may repeat a row: the last of its kind counts.

    Args:
        store: the run's root.
        kind: ``rollout``, ``train`` or ``eval``.
        update: index of the update; for ``eval`` the number of finished ones.
        metrics: declared names only; ``ContractViolation`` otherwise or for a value that is not
            finite.
        names: what else the row says that is no number.
    """
    refuse_undeclared(metrics)
    refuse_non_finite(f"{kind} metrics of update {update}", metrics)
    row: dict[str, Any] = {"kind": kind, "update": update, "time_unix": time.time()}
    store.append_jsonl(layout.METRICS, {**row, **(names or {}), **metrics})


def refuse_non_finite(what: str, values: Mapping[str, float]) -> None:
    """Raise ``ContractViolation`` naming every NaN or infinite value: JSON cannot carry them."""
    wrong = sorted(name for name, value in values.items() if not math.isfinite(value))
    if wrong:
        raise ContractViolation(f"{what}: not finite: {', '.join(wrong)}")
