"""Worked numbers of the loss, and loss and gradient against a float64 reference in plain numpy."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from workers.trainers.loss import LossSettings, aggregation_weights, token_loss

NO_TIS = LossSettings()


def one(new: float, old: float, behavior: float, advantage: float, settings: LossSettings):
    tensors = [torch.tensor([x], dtype=torch.float64) for x in (new, old, behavior, advantage)]
    return token_loss(*tensors, torch.zeros(1, dtype=torch.float64), settings)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected", "clipped"),
    [
        (1.0, 1.5, -1.28, True),
        (-1.0, 0.5, 0.8, True),
        (-1.0, 3.0, 3.0, False),
        (1.0, 0.5, -0.5, False),
        (1.0, 1.0, -1.0, False),
        (0.0, 7.0, 0.0, False),
    ],
)
def test_clipped_objective(advantage, ratio, expected, clipped):
    parts = one(math.log(ratio) - 1.0, -1.0, -1.0, advantage, NO_TIS)
    assert float(parts.total) == pytest.approx(expected, abs=1e-12)
    assert bool(parts.clipped) is clipped


def test_dual_clip_bounds_negative_advantages_only():
    settings = LossSettings(eps_clip_c=2.0)
    assert float(one(math.log(3.0), 0.0, 0.0, -1.0, settings).total) == pytest.approx(2.0)
    assert float(one(math.log(1.5), 0.0, 0.0, -1.0, settings).total) == pytest.approx(1.5)
    assert float(one(math.log(0.5), 0.0, 0.0, 1.0, settings).total) == pytest.approx(-0.5)


def test_importance_weight_is_truncated_and_reported_untruncated():
    parts = one(-1.0, -1.0, -2.0, 1.0, LossSettings(use_tis=True))
    assert float(parts.tis) == pytest.approx(2.718281828, rel=1e-9)
    assert float(parts.total) == pytest.approx(-2.0)
    assert bool(parts.tis_truncated)
    low = one(-3.0, -3.0, -1.0, 1.0, LossSettings(use_tis=True, tis_clip_low=0.5))
    assert float(low.tis) == pytest.approx(math.exp(-2.0))
    assert float(low.total) == pytest.approx(-0.5)


def test_importance_weight_is_constant_for_the_gradient():
    new = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([-1.5], dtype=torch.float64)
    one_ = torch.ones(1, dtype=torch.float64)
    parts = token_loss(new, new, behavior, one_, torch.zeros(1), LossSettings(use_tis=True))
    parts.total.sum().backward()
    assert float(new.grad) == pytest.approx(-math.exp(0.5))


def test_log_ratio_is_limited_to_twenty():
    assert float(one(0.0, -90.0, 0.0, -1.0, NO_TIS).total) == pytest.approx(math.exp(20.0))


def test_centered_group_has_zero_loss_and_a_gradient():
    new = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.5, -0.5, -0.5, 0.5], dtype=torch.float64)
    parts = token_loss(new, new.detach(), new.detach(), advantages, torch.zeros(4), NO_TIS)
    loss = parts.total.mean()
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert new.grad.tolist() == [-0.125, 0.125, 0.125, -0.125]


def reference(samples, settings: LossSettings, aggregation: str):
    """Loss and its derivative by each token's log-prob and entropy, written as the formulas are."""
    total_tokens = sum(max(len(s["new"]), 1) for s in samples)
    loss, d_new, d_entropy = 0.0, [], []
    for s in samples:
        for new, old, beh, ent in zip(s["new"], s["old"], s["behavior"], s["entropy"], strict=True):
            a = s["advantage"]
            share = (
                1 / (max(len(s["new"]), 1) * len(samples))
                if aggregation == "response"
                else 1 / total_tokens
            )
            r = np.exp(np.clip(new - old, -20, 20))
            plain, bounded = (
                -r * a,
                -np.clip(r, 1 - settings.eps_clip, 1 + settings.eps_clip_high) * a,
            )
            value, slope = (plain, -r * a) if plain >= bounded else (bounded, 0.0)
            if settings.eps_clip_c is not None and a < 0 and value > -settings.eps_clip_c * a:
                value, slope = -settings.eps_clip_c * a, 0.0
            if settings.use_tis:
                w = np.clip(np.exp(old - beh), settings.tis_clip_low, settings.tis_clip)
                value, slope = value * w, slope * w
            loss += share * (value - settings.entropy_coef * ent)
            d_new.append(share * slope)
            d_entropy.append(-share * settings.entropy_coef)
    return loss, d_new, d_entropy


def random_samples(seed: int):
    rng = random.Random(seed)
    samples = []
    for length in range(1, 9):
        old = [rng.uniform(-4, -0.1) for _ in range(length)]
        samples.append(
            {
                "old": old,
                "new": [x + rng.uniform(-0.6, 0.6) for x in old],
                "behavior": [x + rng.uniform(-1.0, 1.0) for x in old],
                "entropy": [rng.uniform(0, 2) for _ in range(length)],
                "advantage": rng.choice([-1.5, -0.5, 0.5, 1.0]),
            }
        )
    return samples


def flat(samples, key):
    return torch.tensor([x for s in samples for x in s[key]], dtype=torch.float64)


@pytest.mark.parametrize("aggregation", ["response", "token"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.02])
@pytest.mark.parametrize("num_micro", [1, 2, 4])
@pytest.mark.parametrize("eps_clip_c", [None, 1.2])
def test_loss_and_gradient_equal_the_reference(aggregation, entropy_coef, num_micro, eps_clip_c):
    settings = LossSettings(use_tis=True, entropy_coef=entropy_coef, eps_clip_c=eps_clip_c)
    samples = random_samples(7)
    lengths = torch.tensor([len(s["new"]) for s in samples])
    weights = aggregation_weights(lengths, aggregation, 8, int(lengths.sum()))
    new, entropy = flat(samples, "new").requires_grad_(), flat(samples, "entropy").requires_grad_()
    advantages = torch.tensor([s["advantage"] for s in samples]).double().repeat_interleave(lengths)
    per_token = weights.repeat_interleave(lengths)
    bounds = [0, *itertools.accumulate(lengths.tolist())]
    total = 0.0
    for part in torch.arange(8).chunk(num_micro):
        span = slice(bounds[int(part[0])], bounds[int(part[-1]) + 1])
        parts = token_loss(
            new[span],
            flat(samples, "old")[span],
            flat(samples, "behavior")[span],
            advantages[span],
            entropy[span],
            settings,
        )
        loss = (parts.total * per_token[span]).sum()
        loss.backward()
        total += float(loss.detach())
    expected, d_new, d_entropy = reference(samples, settings, aggregation)
    assert total == pytest.approx(expected, abs=2e-7)
    assert new.grad.tolist() == pytest.approx(d_new, abs=2e-7)
    got = entropy.grad.tolist() if entropy.grad is not None else [0.0] * len(d_entropy)
    assert got == pytest.approx(d_entropy, abs=2e-7)


@pytest.mark.parametrize("aggregation", ["response", "token"])
def test_padded_matrix_gives_the_same_loss_and_no_gradient_at_padding(aggregation):
    samples = random_samples(8)
    lengths = torch.tensor([len(s["new"]) for s in samples])
    mask = torch.arange(8)[None] < lengths[:, None]
    padded = {
        key: torch.zeros(8, 8, dtype=torch.float64).masked_scatter(mask, flat(samples, key))
        for key in ("new", "old", "behavior", "entropy")
    }
    padded["new"].requires_grad_()
    advantages = torch.tensor([[s["advantage"]] for s in samples]).double()
    weights = aggregation_weights(lengths, aggregation, 8, int(lengths.sum()))[:, None] * mask
    settings = LossSettings(use_tis=True)
    parts = token_loss(
        padded["new"], padded["old"], padded["behavior"], advantages, padded["entropy"], settings
    )
    loss = (parts.total * weights).sum()
    loss.backward()
    expected, d_new, _ = reference(samples, settings, aggregation)
    assert float(loss.detach()) == pytest.approx(expected, abs=2e-7)
    assert padded["new"].grad[mask].tolist() == pytest.approx(d_new, abs=2e-7)
    assert padded["new"].grad[~mask].abs().max() == 0


def test_empty_responses_count_as_samples_and_as_one_token():
    lengths = torch.tensor([0, 2])
    assert aggregation_weights(lengths, "response", 2, 3).tolist() == [0.5, 0.25]
    assert aggregation_weights(lengths, "token", 2, 3).tolist() == [1 / 3, 1 / 3]
