"""Ties are dropped with a named reason; missing scores are not zeros."""

import math
import statistics

import pytest

from activities.rollout.filters import drop_reason, has_mixed_rewards, sample_std


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0, 1.0, 1.0, 1.0], "zero_std_1.0"),
        ([0.0, 0.0], "zero_std_0.0"),
        ([0.26, 0.26], "zero_std_0.3"),
        ([-0.04, -0.04], "zero_std_0.0"),
        ([1.0, 0.0], None),
        ([0.0, 0.0, 0.0, 1e-3], None),
        ([0.5, 0.5 + 1e-9], "zero_std_0.5"),  # std 7e-10
        ([math.nan, 1.0], "verifier_error"),
        ([math.nan, math.nan], "verifier_error"),
        ([math.inf, 0.0], "verifier_error"),
    ],
)
def test_drop_reason(rewards, reason):
    assert drop_reason(rewards, filter_zero_std=True) == reason


def test_without_the_filter_only_missing_scores_drop():
    assert drop_reason([1.0, 1.0], filter_zero_std=False) is None
    assert drop_reason([math.nan, 1.0], filter_zero_std=False) == "verifier_error"


@pytest.mark.parametrize("values", [[0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.1, 0.7, 0.7, 3.5, -2.0]])
def test_std_is_the_sample_standard_deviation(values):
    assert sample_std(values) == pytest.approx(statistics.stdev(values), rel=1e-12)


def test_one_sample_has_no_spread():
    assert sample_std([3.0]) == 0.0
    assert not has_mixed_rewards([3.0])
