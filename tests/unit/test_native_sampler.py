"""The sampler's distribution and its random numbers, against brute force."""

import math

import pytest
import torch

from workers.engines.native.sampler import SamplingRows, sample, uniforms

MASK = 2**64 - 1


def rows(n: int, **told: object) -> SamplingRows:
    values = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": -1} | told
    return SamplingRows(
        temperature=torch.full((n,), float(values["temperature"])),  # type: ignore[arg-type]
        top_p=torch.full((n,), float(values["top_p"])),  # type: ignore[arg-type]
        min_p=torch.full((n,), float(values["min_p"])),  # type: ignore[arg-type]
        top_k=torch.full((n,), int(values["top_k"])),  # type: ignore[call-overload]
        seed=torch.full((n,), 11),
        step=torch.arange(n),
    )


def splitmix(z: int) -> int:
    """SplitMix64's output function in plain integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_uniforms_are_a_function_of_seed_and_step() -> None:
    golden = 0x9E3779B97F4A7C15
    seeds, steps = [0, 1, 2**63 - 1, 5], [0, 7, 100, 7]
    expected = []
    for seed, step in zip(seeds, steps, strict=True):
        state = splitmix((seed + golden) & MASK)
        expected.append((splitmix((state + (step + 1) * golden) & MASK) >> 11) * 2.0**-53)
    assert uniforms(torch.tensor(seeds), torch.tensor(steps)).tolist() == expected


def test_uniforms_are_uniform() -> None:
    draws = uniforms(torch.full((40_000,), 3), torch.arange(40_000))
    assert abs(draws.mean().item() - 0.5) < 4 * math.sqrt(1 / 12 / 40_000)
    counts = torch.histc(draws.float(), bins=20, min=0, max=1)
    chi_square = ((counts - 2000) ** 2 / 2000).sum().item()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001


def assert_distribution(chosen: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square of ``chosen`` against ``expected`` [V]; no token of probability 0."""
    counts = torch.bincount(chosen, minlength=len(expected)).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    wanted = expected[possible] * len(chosen)
    chi_square = ((counts[possible] - wanted) ** 2 / wanted).sum().item()
    freedom = int(possible.sum()) - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom)


def truncated(logits: torch.Tensor, top_p: float, top_k: int, min_p: float) -> torch.Tensor:
    """The renormalized distribution, token by token in float64."""
    probabilities = logits.double().softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    kept, before = torch.zeros_like(probabilities), 0.0
    for rank, token in enumerate(order):
        p = probabilities[token].item()
        if before <= top_p and (top_k < 0 or rank < top_k) and p >= min_p * probabilities.max():
            kept[token] = p
        before += p
    return kept / kept.sum()


def test_distributions_of_free_and_restricted_rows() -> None:
    logits = torch.randn(320, generator=torch.Generator().manual_seed(0)) * 2
    n = 60_000
    for told in (
        {},
        {"top_p": 0.7},
        {"top_k": 9},
        {"top_p": 0.8, "top_k": 20},
        {"min_p": 0.02},
    ):
        chosen, _ = sample(logits.repeat(n, 1), rows(n, **told), plain=not told)
        limits = {"top_p": 1.0, "top_k": -1, "min_p": 0.0} | told
        assert_distribution(chosen, truncated(logits, **limits))  # type: ignore[arg-type]


def test_top_p_beyond_the_short_list_falls_back_to_the_full_order() -> None:
    vocabulary, n = 4096, 4_000
    logits = torch.zeros(vocabulary)
    logits[::2] = 1e-3
    chosen, _ = sample(logits.repeat(n, 1), rows(n, top_p=0.5), plain=False)
    assert bool((chosen % 2 == 0).all())
    assert len(chosen.unique()) > 1500


def test_logprobs_are_of_the_full_distribution_at_the_temperature() -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(2)) * 5
    for told in ({}, {"temperature": 0.5}, {"temperature": 0.5, "top_k": 3}, {"temperature": 0.0}):
        chosen, logprobs = sample(logits.clone(), rows(6, **told), plain=False)
        heat = told.get("temperature", 1.0) or 1.0
        expected = (logits.double() / heat).log_softmax(-1).gather(1, chosen.unsqueeze(1))
        torch.testing.assert_close(logprobs.double(), expected.squeeze(1), rtol=0, atol=1e-5)
        if told.get("temperature") == 0.0:
            assert torch.equal(chosen, logits.argmax(-1))


def test_tokens_without_mass_are_never_chosen() -> None:
    for vocabulary in (320, 331, 49152):
        logits = torch.full((64, vocabulary), float("-inf"))
        logits[:, [0, vocabulary // 2]] = 0.0
        chosen, _ = sample(logits, rows(64), plain=True)
        assert set(chosen.tolist()) <= {0, vocabulary // 2}


def test_mixed_rows_keep_their_own_parameters() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(3))
    mixed = rows(4)
    mixed.temperature[1] = 0.0
    mixed.top_k[2] = 1
    chosen, _ = sample(logits.clone(), mixed, plain=False)
    alone, _ = sample(logits.clone(), rows(4), plain=True)
    assert chosen[1] == logits[1].argmax()
    assert chosen[2] == logits[2].argmax()
    assert chosen[[0, 3]].tolist() == alone[[0, 3]].tolist()


def test_broken_weights_give_a_nan_logprob_and_spare_the_neighbors() -> None:
    logits = torch.zeros(2, 320)
    logits[0] = float("nan")
    chosen, logprobs = sample(logits, rows(2), plain=True)
    assert bool(((chosen >= 0) & (chosen < 320)).all())
    assert math.isnan(logprobs[0])
    assert logprobs[1].item() == pytest.approx(-math.log(320), abs=1e-5)
