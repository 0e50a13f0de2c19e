"""The policy-gradient loss: PPO with clip-higher, dual clip, truncated importance weights, entropy.

Pure functions on tensors of any one shape: a flat vector of response tokens [N] or a padded matrix
[S, T] with a mask. For one token with log-probs ``new`` (current), ``old`` (before the update) and
``behavior`` (at sampling time) and advantage A:

    ratio = exp(clamp(new - old, -20, 20))
    L     = max(-ratio * A, -clamp(ratio, 1 - eps_clip, 1 + eps_clip_high) * A)
    A < 0 and dual clip c:  L = min(-c * A, L)
    TIS:  L = L * clamp(exp(old - behavior), tis_clip_low, tis_clip)      (a constant weight)
    loss  = L - entropy_coef * H

Sources: PPO (arXiv 1707.06347), clip-higher of DAPO (2503.14476), dual clip (1912.09729),
truncated importance sampling of behavior and trainer policies.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from configs.run import RunSpec

_LOG_RATIO_LIMIT = 20.0


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
        )


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token results, all of the shape of the inputs."""

    total: Tensor
    """What is optimized: policy part (weighted by TIS) minus the entropy bonus."""
    policy: Tensor
    """The policy-gradient part alone."""
    ratio: Tensor
    """new / old probability."""
    clipped: Tensor
    """Bool: the clipped branch was strictly larger."""
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
) -> TokenLoss:
    """Loss of each token. Gradients flow through ``new`` and ``entropy`` only."""
    ratio = (new - old.detach()).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - settings.eps_clip, 1 + settings.eps_clip_high) * advantages
    policy = torch.maximum(plain, bounded)
    if settings.eps_clip_c is not None:
        ceiling = -settings.eps_clip_c * advantages
        policy = torch.where(advantages < 0, torch.minimum(ceiling, policy), policy)
    weight, truncated = importance_weights(old.detach(), behavior, settings)
    if settings.use_tis:
        policy = policy * weight.clamp(settings.tis_clip_low, settings.tis_clip)
    total = policy
    if settings.entropy_coef != 0:
        total = policy - settings.entropy_coef * entropy
    return TokenLoss(total, policy, ratio.detach(), bounded > plain, weight, truncated)


def importance_weights(
    old: Tensor, behavior: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """exp(old - behavior) and where the truncation changes it; ones and nowhere without TIS."""
    if not settings.use_tis:
        return torch.ones_like(old), torch.zeros_like(old, dtype=torch.bool)
    weight = (old - behavior).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    return weight, (weight < settings.tis_clip_low) | (weight > settings.tis_clip)


def aggregation_weights(
    lengths: Tensor, aggregation: Literal["response", "token"], num_samples: int, num_tokens: int
) -> Tensor:
    """Weight of one token of each sample, so that the step's loss is a plain weighted sum.

    Args:
        lengths: [S] response lengths, empty responses included.
        aggregation: ``response``: mean over samples of token means; ``token``: mean over tokens.
        num_samples: Samples of the whole optimizer step, those without a gradient included.
        num_tokens: Sum of max(length, 1) over the same samples.

    Returns:
        [S] weights in float64.
    """
    if aggregation == "response":
        return 1.0 / (lengths.clamp(min=1).double() * num_samples)
    return torch.full(lengths.shape, 1.0 / num_tokens, dtype=torch.float64)
