"""What a collection reports of its samples: worked values, and what no value is reported of."""

import math
import random

import pytest

from activities.rollout.sample_metrics import is_repetitive, prefix_cache_hit_rate, sample_metrics
from activities.rollout.summary import SampledTally
from models.metrics import is_declared, is_mean_reward, refuse_undeclared
from models.sample import FinishReason, PrefixUse, Sample, SampleGroup, TokenSpan

WINDOW = 10_000


def sample(
    spans: list[tuple[int, int]], text: str = "", use: PrefixUse | None = None, reward: float = 0.0
) -> Sample:
    """``spans`` are (version, tokens)."""
    made, at = [], 0
    for version, tokens in spans:
        made.append(TokenSpan(version, at, at + tokens))
        at += tokens
    return Sample(
        0, 0, [1], [2] * at, [-1.0] * at, made, FinishReason.STOP, text, reward, prefix_use=use
    )


def group(rewards: list[float]) -> SampleGroup:
    return SampleGroup(0, "p", 0, [sample([(0, 1)], reward=reward) for reward in rewards])


def hex_digits(count: int) -> str:
    """Half a byte each, which nothing can compress."""
    return "".join(random.Random(17).choices("0123456789abcdef", k=count))


def test_worked_values() -> None:
    """Versions 5 to 7; lengths 10, 3, 4, 5; of 260 input tokens engines had 126."""
    metrics = sample_metrics(
        [
            sample([(5, 4), (7, 6)], "ab" * 6000, PrefixUse(100, 96)),
            sample([(7, 3)], "short", PrefixUse(100, 0)),
            sample([(6, 4)], "short"),
            sample([(5, 5)], hex_digits(12_000), PrefixUse(60, 30)),
        ]
    )
    refuse_undeclared(metrics)
    assert metrics == pytest.approx(
        {
            "rollout/response_len/mean": 5.5,
            "rollout/response_len/median": 4.5,
            "rollout/response_len/min": 3,
            "rollout/response_len/max": 10,
            "rollout/repetition_frac": 0.25,
            "rollout/weight_version/mean": 5.75,
            "rollout/weight_version/median": 5.5,
            "rollout/weight_version/min": 5,
            "rollout/weight_version/max": 7,
            "rollout/weight_version/mixed_version_ratio": 0.25,
            "rollout/prefix_cache_hit_rate": 126 / 260,
        }
    )
    assert not any(isinstance(value, bool) for value in metrics.values())


def test_a_cache_of_which_nobody_told_has_no_rate() -> None:
    assert prefix_cache_hit_rate([sample([(0, 1)])]) is None
    assert "rollout/prefix_cache_hit_rate" not in sample_metrics([sample([(0, 1)])])
    assert prefix_cache_hit_rate([sample([(0, 1)], use=PrefixUse(7, 0))]) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", False),
        ("ab" * (WINDOW // 2), False),  # not longer than the window
        ("ab" * (WINDOW // 2) + "a", True),
        ("\N{SNOWMAN}" * (WINDOW + 1), True),  # characters count, not bytes
        ("\N{SNOWMAN}" * (WINDOW // 2), False),
        (hex_digits(WINDOW) + "ab" * WINDOW, True),  # only the end counts
        ("ab" * WINDOW + hex_digits(WINDOW), False),
        # A tenth of the window is 1000 bytes: 3000 digits cannot fit, 1000 take 500 and overhead.
        (hex_digits(3000) + "a" * (WINDOW - 3000 + 1), False),
        ("a" * (WINDOW - 1000 + 1) + hex_digits(1000), True),
    ],
)
def test_a_text_is_repetitive_when_its_end_compresses_more_than_tenfold(
    text: str, expected: bool
) -> None:
    assert is_repetitive(text) is expected


def test_tied_groups_are_counted_by_their_reward_and_merged_once() -> None:
    first, second = SampledTally(), SampledTally()
    for rewards in ([1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [math.nan, 1.0]):
        first.add(group(rewards), None)
    for rewards in ([0.0, 0.0], [-0.04, -0.04], [0.26, 0.26], [math.nan, math.nan]):
        second.add(group(rewards), None)
    first.merge(second)
    metrics = first.tie_metrics()
    refuse_undeclared(metrics)
    assert metrics == {
        "rollout/zero_std/ratio": 5 / 8,
        "rollout/zero_std/count_0.0": 3,
        "rollout/zero_std/count_0.3": 1,
        "rollout/zero_std/count_1.0": 1,
    }
    assert SampledTally().tie_metrics() == {"rollout/zero_std/ratio": 0.0}


def test_a_mean_reward_is_told_from_the_figures_beside_it() -> None:
    assert is_mean_reward("eval/heldout")
    assert is_mean_reward("eval/aime-24")
    beside = ("eval/step", "eval/checkpoint_update", "eval/heldout-truncated_ratio")
    beside += ("eval/heldout-none_reward_ratio", "eval/heldout/response_len/mean")  # type: ignore[assignment]
    for name in beside:
        assert is_declared(name)
        assert not is_mean_reward(name)
    assert not is_mean_reward("rollout/reward")
