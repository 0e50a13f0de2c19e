"""KL estimates, divergence masks and whitening at values computed by hand."""

import math

import pytest
import torch

from models.sample import FinishReason, Sample, SampleGroup, TokenSpan
from workers.trainers.batch import TrainingBatch
from workers.trainers.loss import LossSettings, divergence, kl_estimate, token_loss


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "delta", "expected"),
    [
        ("k1", 0.1, 0.1),
        ("k1", -0.5, -0.5),
        ("k2", 0.1, 0.005),
        ("k2", -0.5, 0.125),
        ("k3", 0.1, 0.004837418),
        ("k3", -0.5, 0.148721271),
        ("low_var_kl", 0.1, 0.004837418),
        ("low_var_kl", -0.5, 0.148721271),
        ("k3", -4.0, math.exp(4.0) - 5.0),
        ("low_var_kl", -4.0, 10.0),  # 49.6 without the limit
        ("k3", 30.0, 29.0),
        ("low_var_kl", 30.0, 10.0),
        ("low_var_kl", 8.0, 7.0003354626),
    ],
)
def test_kl_estimates(kind, delta, expected):
    found = kl_estimate(t(-1.0 + delta), t(-1.0), kind)
    assert float(found) == pytest.approx(expected, abs=1e-9)


def test_the_exponent_of_the_limited_estimate_is_clamped():
    new = t(-3000.0).requires_grad_()
    value = kl_estimate(new, t(0.0), "low_var_kl")
    value.sum().backward()
    assert float(value.detach()) == 10.0
    assert new.grad.tolist() == [0.0]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_kl_term_is_added_with_its_weight_and_starts_at_zero(kind):
    settings = LossSettings(kl_coef=0.5, kl_type=kind)
    new = t(-1.0)
    at_reference = token_loss(new, new, new, t(1.0), t(0.0), settings, reference=t(-1.0))
    assert float(at_reference.total) == -1.0
    assert float(at_reference.kl) == 0.0
    away = token_loss(new, new, new, t(1.0), t(0.0), settings, reference=t(-1.5))
    expected = {"k1": 0.5, "k2": 0.125}.get(kind, math.exp(-0.5) - 1 + 0.5)
    assert float(away.kl) == pytest.approx(expected)
    assert float(away.total) == pytest.approx(-1.0 + 0.5 * expected)
    assert float(away.policy) == -1.0


def test_entropy_is_a_bonus():
    parts = token_loss(t(-1.0), t(-1.0), t(-1.0), t(1.0), t(2.0), LossSettings(entropy_coef=0.02))
    assert float(parts.total) == pytest.approx(-1.04)


MU, PI = -0.5, -0.2  # e^-0.5 = 0.60653, e^-0.2 = 0.81873: ratio 1.34986, distance 0.21220


@pytest.mark.parametrize(
    ("advantage", "threshold", "expected", "masked"),
    [
        (1.0, 0.1, 0.0, True),
        (-1.0, 0.1, 1.349858808, False),
        (1.0, 0.22, -1.349858808, False),
        (2.0, 0.3, -2.699717615, False),
    ],
)
def test_a_token_that_moved_too_far_along_its_advantage_is_masked(
    advantage, threshold, expected, masked
):
    settings = LossSettings(dppo_divergence="tv", dppo_threshold=threshold)
    new = t(PI).requires_grad_()
    parts = token_loss(new, t(MU), t(MU), t(advantage), t(0.0), settings)
    assert float(parts.total.detach()) == pytest.approx(expected, abs=1e-9)
    assert bool(parts.clipped) is masked
    parts.total.sum().backward()
    # the derivative of -A * ratio by the log-prob is itself: no clip bounds it
    assert float(new.grad) == pytest.approx(expected, abs=1e-9)


def test_falling_probabilities_are_masked_for_negative_advantages_only():
    settings = LossSettings(dppo_divergence="tv")
    for advantage, masked in ((-1.0, True), (1.0, False)):
        parts = token_loss(t(MU), t(PI), t(PI), t(advantage), t(0.0), settings)
        assert bool(parts.clipped) is masked


def test_an_unmoved_token_is_never_masked():
    settings = LossSettings(dppo_divergence="kl", dppo_threshold=1e-9)
    parts = token_loss(t(-1.0), t(-1.0), t(-1.0), t(1.0), t(0.0), settings)
    assert not bool(parts.clipped)


def test_divergences():
    assert float(divergence(t(PI), t(MU), "tv")) == pytest.approx(0.212200093, abs=1e-9)
    mu, pi = math.exp(MU), math.exp(PI)
    expected = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    assert float(divergence(t(PI), t(MU), "kl")) == pytest.approx(expected, abs=1e-12)
    assert expected == pytest.approx(0.122987, abs=1e-6)
    # certain tokens stay finite, and log-probs count from -30 on
    assert math.isfinite(float(divergence(t(0.0), t(-1.0), "kl")))
    assert float(divergence(t(0.0), t(0.0), "kl")) == 0.0
    assert float(divergence(t(-40.0), t(-90.0), "tv")) == 0.0


def test_a_log_ratio_that_is_no_number_counts_as_zero():
    """In padded matrices masked positions hold anything; their weight is 0."""
    new = torch.tensor([-1.0, math.nan], dtype=torch.float64, requires_grad=True)
    old = t(-1.0, -2.0)
    parts = token_loss(new, old, old, t(1.0, 1.0), t(0.0, 0.0), LossSettings())
    assert parts.ratio.tolist() == [1.0, 1.0]
    (parts.total * t(1.0, 0.0)).sum().backward()
    assert new.grad.tolist() == [-1.0, 0.0]


def group(index: int, lengths: list[int], advantages: list[float]) -> SampleGroup:
    samples = [
        Sample(
            sample_index=number,
            group_index=index,
            prompt_token_ids=[1],
            response_token_ids=[5] * length,
            logprobs=[-1.0] * length,
            spans=[TokenSpan(0, 0, length)],
            finish_reason=FinishReason.STOP,
        )
        for number, length in enumerate(lengths)
    ]
    return SampleGroup(index, f"p{index}", 0, samples, advantages)


def test_whitened_advantages_have_mean_zero_and_variance_one_over_active_tokens():
    groups = [group(0, [1, 3], [0.5, -0.5]), group(1, [4, 2], [1.0, -1.0])]
    groups[1].samples[0].loss_mask = [1, 0, 0, 1]
    batch = TrainingBatch.of(groups).whitened()
    # active tokens: 0.5, 3 x -0.5, 2 x 1.0, 2 x -1.0; mean -1/8, squares 5, 8 tokens
    deviation = math.sqrt((5 - 8 / 64) / 7)
    expected = [(a + 0.125) / deviation for a in (0.5, -0.5, 1.0, -1.0)]
    assert [s.advantage for s in batch.samples] == pytest.approx(expected, rel=1e-7)
    per_token = batch.advantages.double()[batch.active]
    assert float(per_token.mean()) == pytest.approx(0.0, abs=1e-7)
    assert float(per_token.var()) == pytest.approx(1.0, abs=1e-6)
    assert batch.num_mixed_groups == 2


def test_whitening_tied_rewards_leaves_no_signal():
    batch = TrainingBatch.of([group(0, [1, 3], [0.0, 0.0])]).whitened()
    assert batch.advantages.abs().max() == 0
    single = TrainingBatch.of([group(0, [1], [0.0])]).whitened()
    assert single.advantages.tolist() == [0.0]


def test_whitening_equal_advantages_of_all_active_tokens_leaves_no_signal():
    """The mean of six times 0.7 is not 0.7: rounding must not look like a gradient."""
    groups = [group(0, [6, 3, 2], [0.7, -0.3, -0.4])]
    for sample in groups[0].samples[1:]:
        sample.loss_mask = [0] * len(sample.response_token_ids)
    assert 6 * 0.7 / 6 != 0.7
    single = TrainingBatch.of(groups).whitened()
    assert single.advantages.abs().max() == 0
