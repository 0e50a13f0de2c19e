"""The policy-gradient loss of response tokens and its normalization.

Pure functions on tensors of any one shape: a flat vector of response tokens [N] or a padded matrix
[S, T] with a mask. For one token with log-probs ``new`` (current), ``old`` (the anchor: before the
update, or the behavior's), ``behavior`` (at sampling time), ``ref`` (frozen) and advantage A:

    ratio = exp(clamp(new - old, -20, 20)); a log-ratio that is NaN counts as 0
    L     = max(-ratio * A, -clamp(ratio, 1 - eps_clip, 1 + eps_clip_high) * A)
    A < 0 and dual clip c:  L = min(-c * A, L)
    masked (DPPO):  L = -keep * A * ratio    with keep = 0 where the token's probability left the
                    old one by more than the threshold in the direction of its advantage
    TIS:  L = L * clamp(exp(old - behavior), tis_clip_low, tis_clip)      (a constant weight)
    loss  = L - entropy_coef * H + kl_coef * k,   with d = new - ref
            k1 = d      k2 = d^2 / 2      k3 = exp(-d) - 1 + d
            low_var_kl = k3 with d clamped to +-20 and the result to +-10

A sequence ratio (GSPO) is the same with the mean log-ratio of the response in place of each token's
own. Sources: PPO (arXiv 1707.06347), clip-higher of DAPO (2503.14476), dual clip (1912.09729), GSPO
(2507.18071), estimators of KL (joschu.net/blog/kl-approx.html), truncated importance sampling of
behavior and trainer policies.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from configs.run import RunSpec

_LOG_RATIO_LIMIT = 20.0
_LOW_VAR_KL_LIMIT = 10.0
_LEAST_LOGPROB = -30.0  # of a probability in a divergence

KlType = Literal["k1", "k2", "k3", "low_var_kl"]


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The numbers of the loss; see ``[training]`` for their meaning."""

    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    eps_clip_c: float | None = None
    use_tis: bool = False
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_type: KlType = "k1"
    sequence_ratio: bool = False
    behavior_anchor: bool = False
    dppo_divergence: Literal["tv", "kl"] | None = None
    dppo_threshold: float = 0.1

    @classmethod
    def of(cls, spec: RunSpec) -> "LossSettings":
        """The settings that a run file asks for."""
        training = spec.training
        return cls(
            eps_clip=training.eps_clip,
            eps_clip_high=training.eps_clip_high,
            eps_clip_c=training.eps_clip_c,
            use_tis=spec.uses_tis,
            tis_clip=training.tis_clip,
            tis_clip_low=training.tis_clip_low,
            entropy_coef=training.entropy_coef,
            kl_coef=training.kl_loss_coef,
            kl_type=training.kl_loss_type,
            sequence_ratio=training.advantage_estimator == "gspo",
            behavior_anchor=training.use_rollout_logprobs,
            dppo_divergence=training.dppo_divergence_type,
            dppo_threshold=training.dppo_threshold,
        )

    @property
    def needs_every_sample(self) -> bool:
        """Whether a sample with advantage 0 has a gradient: the loss has terms without it."""
        return self.entropy_coef != 0 or self.kl_coef != 0


@dataclass(frozen=True, slots=True)
class SequenceTerms:
    """What a sequence ratio knows of each token's whole response; constants, shape of the inputs.

    The gradient of a response's loss spreads evenly over its tokens, so a token carries the mean
    weight of its response instead of its own.
    """

    log_ratio: Tensor
    """Mean of new - old over the response's active tokens."""
    weight: Tensor
    """Mean truncated importance weight over the same tokens; ones without TIS."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token results, all of the shape of the inputs."""

    total: Tensor
    """What is optimized: policy part (weighted by TIS), minus the entropy bonus, plus KL."""
    policy: Tensor
    """The policy-gradient part alone."""
    kl: Tensor
    """The KL estimate, without its coefficient; zeros without a reference."""
    ratio: Tensor
    """new / old probability; of the whole response with a sequence ratio."""
    clipped: Tensor
    """Bool: the clipped branch was strictly larger, or the token was masked (DPPO)."""
    tis: Tensor
    """old / behavior probability before truncation; ones when TIS is off."""
    tis_truncated: Tensor
    """Bool: the truncation changed the weight."""


def token_loss(
    new: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    entropy: Tensor,
    settings: LossSettings,
    *,
    reference: Tensor | None = None,
    sequence: SequenceTerms | None = None,
) -> TokenLoss:
    """Loss of each token. Gradients flow through ``new`` and ``entropy`` only.

    Args:
        new: log-probs under the current weights.
        old: log-probs that the ratio is taken against.
        behavior: log-probs at sampling time.
        advantages: of each token, or broadcastable.
        entropy: of the whole distribution at each token, in nats.
        settings: the numbers.
        reference: log-probs of the frozen model; needed with ``kl_coef``.
        sequence: needed with, and only with, ``sequence_ratio``.
    """
    log_ratio = (new - old.detach()).nan_to_num(nan=0.0)
    if sequence is not None:
        log_ratio = sequence.log_ratio + (log_ratio - log_ratio.detach())
    ratio = log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    if settings.dppo_divergence is None:
        policy, clipped = _clipped_objective(ratio, advantages, settings)
    else:
        policy, clipped = _masked_objective(ratio, new, old, advantages, settings)
    weight, truncated = importance_weights(old.detach(), behavior, settings)
    if settings.use_tis:
        own = weight.clamp(settings.tis_clip_low, settings.tis_clip)
        policy = policy * (own if sequence is None else sequence.weight)
    total = policy
    if settings.entropy_coef != 0:
        total = total - settings.entropy_coef * entropy
    kl = torch.zeros_like(policy, requires_grad=False)
    if settings.kl_coef != 0:
        assert reference is not None, "a KL term needs the reference's log-probs"
        kl = kl_estimate(new, reference, settings.kl_type)
        total = total + settings.kl_coef * kl
    return TokenLoss(total, policy, kl.detach(), ratio.detach(), clipped, weight, truncated)


def kl_estimate(new: Tensor, reference: Tensor, kind: KlType) -> Tensor:
    """Estimate of KL(current | reference) at each token that the current policy sampled."""
    d = new - reference.detach()
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "low_var_kl":
        d = d.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    k3 = torch.exp(-d) - 1 + d
    return k3 if kind == "k3" else k3.clamp(-_LOW_VAR_KL_LIMIT, _LOW_VAR_KL_LIMIT)


def importance_weights(
    old: Tensor, behavior: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """exp(old - behavior) and where the truncation changes it; ones and nowhere without TIS."""
    if not settings.use_tis:
        return torch.ones_like(old), torch.zeros_like(old, dtype=torch.bool)
    weight = (old - behavior).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    return weight, (weight < settings.tis_clip_low) | (weight > settings.tis_clip)


def divergence(new: Tensor, old: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """How far a token's probability moved, the rest of the vocabulary taken as one outcome.

    ``tv`` is |old - new| probability, ``kl`` KL(old | new) of the two Bernoulli distributions.
    """
    log_mu, log_pi = old.clamp(_LEAST_LOGPROB, 0.0), new.clamp(_LEAST_LOGPROB, 0.0)
    mu, pi = log_mu.exp(), log_pi.exp()
    if kind == "tv":
        return (mu - pi).abs()
    tiny = torch.finfo(new.dtype).tiny
    rest_mu, rest_pi = -torch.expm1(log_mu), (-torch.expm1(log_pi)).clamp(min=tiny)
    return mu * (log_mu - log_pi) + torch.xlogy(rest_mu, rest_mu) - rest_mu * rest_pi.log()


def aggregation_weights(
    lengths: Tensor, aggregation: Literal["response", "token"], num_samples: int, num_tokens: int
) -> Tensor:
    """Weight of one token of each sample, so that the step's loss is a plain weighted sum.

    Args:
        lengths: [S] active response tokens, samples without any included.
        aggregation: ``response``: mean over samples of token means; ``token``: mean over tokens.
        num_samples: Samples of the whole optimizer step, those without a gradient included.
        num_tokens: Sum of max(length, 1) over the same samples.

    Returns:
        [S] weights in float64.
    """
    if aggregation == "response":
        return 1.0 / (lengths.clamp(min=1).double() * num_samples)
    return torch.full(lengths.shape, 1.0 / num_tokens, dtype=torch.float64)


def _clipped_objective(
    ratio: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """PPO with clip-higher and, for negative advantages, dual clip."""
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - settings.eps_clip, 1 + settings.eps_clip_high) * advantages
    policy = torch.maximum(plain, bounded)
    if settings.eps_clip_c is not None:
        ceiling = -settings.eps_clip_c * advantages
        policy = torch.where(advantages < 0, torch.minimum(ceiling, policy), policy)
    return policy, bounded > plain


def _masked_objective(
    ratio: Tensor, new: Tensor, old: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """DPPO: no clip; a token that moved too far along its advantage has no loss."""
    assert settings.dppo_divergence is not None
    onward = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
    moved = divergence(new.detach(), old.detach(), settings.dppo_divergence)
    masked = onward & (moved > settings.dppo_threshold)
    return torch.where(masked, 0.0, -ratio * advantages), masked
