"""The profile of log-prob gaps at values computed by hand."""

import pytest
import torch

from models.errors import ContractViolation
from models.metrics import refuse_undeclared
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan
from workers.trainers.batch import TrainingBatch
from workers.trainers.ranks import SingleRank
from workers.trainers.score_profile import score_metrics, score_profile

NAN = float("nan")


def batch_of(*gaps: list[float], masks: dict[int, list[int]] | None = None) -> TrainingBatch:
    """One group; the behavior log-prob of every token is -2 less its gap."""
    samples = [
        Sample(
            sample_index=number,
            group_index=0,
            prompt_token_ids=[1],
            response_token_ids=[5] * len(own),
            logprobs=[-2.0 - gap for gap in own],
            spans=[TokenSpan(0, 0, len(own))],
            finish_reason=FinishReason.STOP,
            loss_mask=(masks or {}).get(number),
        )
        for number, own in enumerate(gaps)
    ]
    return TrainingBatch.of([SampleGroup(0, "p", 0, samples, [1.0] * len(samples))])


def profile(batch: TrainingBatch, old: torch.Tensor | None = None) -> dict:
    scored = torch.full((batch.num_tokens,), -2.0) if old is None else old
    scored = torch.where(batch.active, scored, NAN)
    return score_profile(batch, scored, SingleRank(), rollout_id=3, source="standalone")


def test_the_worked_example():
    event = profile(batch_of([0.0, 0.01, 99.0, 0.8], masks={0: [1, 1, 0, 1]}))
    assert (event["rollout_id"], event["source"]) == (3, "standalone")
    assert event["active_tokens"] == 3
    assert event["max_abs"] == pytest.approx(0.8, abs=1e-6)
    assert event["mean_abs"] == pytest.approx(0.27, abs=1e-6)
    assert event["p95_upper"] == event["p99_upper"] == 1.0
    assert event["histogram_upper_edges"] == [0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0]
    assert sum(event["histogram_counts"]) == 3
    assert (event["histogram_counts"][0], event["histogram_counts"][8]) == (1, 1)
    groups = event["groups"]
    assert groups["last_third"]["tokens"] == 1
    assert groups["last_third"]["mean_abs"] == pytest.approx(0.8, abs=1e-6)
    assert groups["first_third"]["mean_abs"] == pytest.approx(0.005, abs=1e-6)
    assert groups["middle_third"] == {"tokens": 0, "mean_abs": None}
    assert groups["length_le_1024"]["tokens"] == 3
    assert groups["length_gt_4096"] == {"tokens": 0, "mean_abs": None}


def test_edges_belong_to_their_bin_and_the_last_bin_has_none():
    exact = [0.25, 0.5, 1.0, 1.5]  # sums of powers of two: no rounding
    event = profile(batch_of(exact))
    assert event["histogram_counts"] == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert (event["p50_upper"], event["p95_upper"]) == (0.5, None)
    metrics = score_metrics(event)
    refuse_undeclared(metrics)
    assert metrics["train/collection_score_p50_upper"] == 0.5
    assert metrics["train/collection_score_p50_upper_overflow"] == 0.0
    assert "train/collection_score_p95_upper" not in metrics
    assert metrics["train/collection_score_p95_upper_overflow"] == 1.0
    assert metrics["train/collection_score_max_abs"] == 1.5
    assert metrics["train/collection_score_mean_abs"] == 0.8125
    assert metrics["train/collection_score_active_tokens"] == 4.0


def test_a_percentile_is_the_first_bin_that_reaches_it():
    event = profile(batch_of([0.0] * 95 + [0.75] * 5))
    assert (event["p50_upper"], event["p95_upper"], event["p99_upper"]) == (0.001, 0.001, 1.0)
    event = profile(batch_of([0.0] * 94 + [0.75] * 6))
    assert event["p95_upper"] == 1.0


@pytest.mark.parametrize(
    ("length", "thirds"), [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (8, [3, 3, 2])]
)
def test_thirds_of_a_response(length, thirds):
    groups = profile(batch_of([0.0] * length))["groups"]
    names = ("first_third", "middle_third", "last_third")
    assert [groups[name]["tokens"] for name in names] == thirds


def test_length_classes_count_masked_tokens_in_the_length():
    batch = batch_of([0.25] * 1024, [0.5] * 1025, [1.0] * 4097, masks={1: [1] + [0] * 1024})
    groups = profile(batch)["groups"]
    assert groups["length_le_1024"] == {"tokens": 1024, "mean_abs": 0.25}
    assert groups["length_1025_4096"] == {"tokens": 1, "mean_abs": 0.5}
    assert groups["length_gt_4096"] == {"tokens": 4097, "mean_abs": 1.0}


def test_no_active_token_at_all_is_refused():
    batch = batch_of([0.0, 1.0], masks={0: [0, 0]})
    with pytest.raises(ContractViolation, match="update 3: no active token was scored"):
        profile(batch)
