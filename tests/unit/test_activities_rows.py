"""Rows for people: names, step keys, and what is refused."""

import math
from pathlib import Path

import pytest

from activities.rows import (
    append_metrics,
    eval_metrics,
    eval_samples,
    rollout_metrics,
    train_metrics,
)
from activities.storage import layout
from activities.storage.store import Store
from activities.timing import timed
from models.errors import ContractViolation
from models.evaluation import EvaluationReport
from models.metrics import refuse_undeclared
from models.rollout import CollectionCounts, RolloutCollection
from models.update import UpdateReport

COUNTS = CollectionCounts(
    groups=2, samples=8, prompt_tokens=80, response_tokens=400, truncated_samples=2,
    invalid_verdicts=1, mixed_reward_groups=1, filtered_groups={"zero_std_1.0": 3},
    failed_attempts={"transport": 2, "timeout": 1},
)  # fmt: skip
COLLECTION = RolloutCollection(
    update=4, epoch=1, uri="u", sha256="s", counts=COUNTS, reward_mean=0.25, min_version=6,
    max_version=8, seconds=2.0, metrics={"rollout/response_len/max": 90.0},
)  # fmt: skip
REPORT = UpdateReport(
    update=4, batch_sha256="s", policy_version=10, optimizer_steps=2, no_signal=False,
    metrics={"train/loss": -0.5}, seconds=3.0, resident_bytes=7,
)  # fmt: skip


def test_a_rollout_row_counts_what_the_collection_says() -> None:
    row = rollout_metrics(COLLECTION)
    refuse_undeclared(row)
    assert row["rollout/step"] == 4
    assert row["rollout/reward"] == 0.25
    assert row["rollout/response_len/mean"] == 50.0
    assert row["rollout/response_len/max"] == 90.0
    assert row["rollout/truncated_ratio"] == 0.25
    assert row["rollout/requeued_groups"] == 3
    assert row["rollout/response_tokens_per_second"] == 200.0


def test_a_train_row_is_plotted_against_completed_steps_minus_one() -> None:
    row = train_metrics(REPORT, COLLECTION)
    refuse_undeclared(row)
    assert row["train/step"] == 9
    assert row["train/rollout_id"] == 4
    # consumed at version 8, before this update's two steps; sampled at 6 or later
    assert row["train/lag"] == 2
    assert row["train/loss"] == -0.5


def test_an_eval_row_is_named_after_its_set() -> None:
    report = EvaluationReport(
        update=5, policy_version=10, name="words", prompts=3, samples=6, reward_mean=0.5,
        truncated_fraction=0.1, error_fraction=0.0, mean_response_tokens=8.0, uri="u", seconds=1.0,
    )  # fmt: skip
    row = eval_metrics(report)
    refuse_undeclared(row)
    assert row["eval/step"] == 5
    assert row["eval/words"] == 0.5
    assert eval_samples(report) == {"uri": "u"}
    assert eval_samples(report.model_copy(update={"sha256": "ab"}))["sha256"] == "ab"


def test_a_row_names_the_file_that_it_is_about(tmp_path: Path) -> None:
    store = Store(tmp_path)
    append_metrics(store, "eval", 5, {"eval/step": 5}, {"uri": "u", "sha256": "ab"})
    (row,) = store.read_jsonl(layout.METRICS).rows
    assert (row["kind"], row["update"], row["uri"], row["sha256"]) == ("eval", 5, "u", "ab")


def test_undeclared_and_non_finite_values_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ContractViolation, match="train/colour"):
        append_metrics(store, "train", 0, {"train/colour": 1.0})
    with pytest.raises(ContractViolation, match="not finite: train/loss"):
        append_metrics(store, "train", 0, {"train/loss": math.nan})
    assert not store.exists(layout.METRICS)


async def test_a_failed_stage_is_timed_too(tmp_path: Path) -> None:
    store = Store(tmp_path)
    async with timed(store, "training", 3):
        pass
    with pytest.raises(ValueError, match="x"):
        async with timed(store, "evaluation", None, {"phase": "final"}):
            raise ValueError("x")
    first, second = store.read_jsonl(layout.DRIVER_TIMING).rows
    assert (first["stage"], first["rollout_id"], first["passed"]) == ("training", 3, True)
    assert second["passed"] is False
    assert second["rollout_id"] is None
    assert second["details"] == {"phase": "final"}
    assert second["seconds"] >= 0
