"""Group advantages against the worked numbers and a float64 reference."""

import math
import statistics

import hypothesis.strategies as st
import pytest
from hypothesis import given

from activities.rollout.advantages import group_advantages


@pytest.mark.parametrize(
    ("rewards", "normalize", "expected"),
    [
        ([1, 0, 0, 1], False, [0.5, -0.5, -0.5, 0.5]),
        ([1, 0, 0, 1], True, [0.8660, -0.8660, -0.8660, 0.8660]),
        ([1, 0, 0, 0], False, [0.75, -0.25, -0.25, -0.25]),
        ([1, 0, 0, 0], True, [1.5, -0.5, -0.5, -0.5]),
        ([1, 1, 1], True, [0, 0, 0]),
        ([1], True, [0]),
        ([1], False, [0]),
    ],
)
def test_worked_numbers(rewards, normalize, expected):
    assert group_advantages(rewards, normalize) == pytest.approx(expected, abs=5e-5)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16), st.booleans())
def test_against_the_formula(rewards, normalize):
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    scale = std + 1e-6 if normalize else 1.0
    expected = [(reward - mean) / scale if std > 1e-8 else 0.0 for reward in rewards]
    assert group_advantages(rewards, normalize) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("size", [3, 5, 6, 7, 8, 10])
@pytest.mark.parametrize("normalize", [False, True])
def test_equal_rewards_have_no_advantage_at_all(size, normalize):
    for hundredths in range(101):
        assert group_advantages([hundredths / 100] * size, normalize) == [0.0] * size


def test_a_missing_score_has_no_advantage():
    with pytest.raises(ValueError, match="nan"):
        group_advantages([1.0, math.nan], False)
