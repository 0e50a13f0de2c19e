"""Sums over the tokens of an update, in float64, and the metrics that follow from them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.trainers.batch import TrainingBatch
from workers.trainers.loss import TokenLoss


@dataclass(slots=True)
class UpdateTally:
    """Accumulates what the loss saw, over micro-batches and optimizer steps."""

    tokens: int = 0
    model_tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    step_losses: list[float] = field(default_factory=list)
    step_policy_losses: list[float] = field(default_factory=list)

    def add(
        self, parts: TokenLoss, new: Tensor, old: Tensor, behavior: Tensor, entropy: Tensor
    ) -> None:
        """Count the tokens of one chunk; all arguments are [n], detached."""
        self.tokens += len(new)
        ratio = parts.ratio.double()
        self._sum("clipped", parts.clipped)
        self._sum("kl", old - new)
        self._sum("entropy", entropy)
        self._sum("ratio", ratio)
        self._sum("ratio_squared", ratio * ratio)
        self._sum("tis", parts.tis)
        self._sum("tis_abs", (parts.tis - 1).abs())
        self._sum("tis_truncated", parts.tis_truncated)
        self._sum("behavior_gap", (old - behavior).abs())
        self._sum("behavior_kl", behavior - old)

    def mean(self, name: str) -> float:
        """Mean of one sum over the counted tokens; 0 without any."""
        return self.sums.get(name, 0.0) / max(self.tokens, 1)

    def metrics(self, *, uses_tis: bool) -> dict[str, float]:
        """The token-level rows of the metrics table."""
        squared = self.sums.get("ratio_squared", 0.0) * max(self.tokens, 1)
        rows = {
            "train/loss": _average(self.step_losses),
            "train/pg_loss": _average(self.step_policy_losses),
            "train/entropy_loss": self.mean("entropy"),
            "train/pg_clipfrac": self.mean("clipped"),
            "train/ppo_kl": self.mean("kl"),
            "train/ess_ratio": self.sums.get("ratio", 0.0) ** 2 / squared if squared else 0.0,
            "train/train_rollout_logprob_abs_diff": self.mean("behavior_gap"),
            "train/train_rollout_kl": self.mean("behavior_kl"),
            "train/model_tokens": float(self.model_tokens),
            "train/active_response_tokens": float(self.tokens),
        }
        if uses_tis:
            rows["train/tis"] = self.mean("tis")
            rows["train/tis_abs"] = self.mean("tis_abs")
            rows["train/tis_clipfrac"] = self.mean("tis_truncated")
        return rows

    def _sum(self, name: str, values: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(values.detach().double().sum())


def advantage_metrics(batch: TrainingBatch) -> dict[str, float]:
    """``advantages/*`` over the samples of a collection, and its groups with a gradient."""
    values = torch.tensor([sample.advantage for sample in batch.samples], dtype=torch.float64)
    magnitude = values.abs()
    total = float(magnitude.sum())
    mixed = {sample.group for sample in batch.samples if sample.advantage != 0.0}
    return {
        "advantages/max": float(values.max()),
        "advantages/min": float(values.min()),
        "advantages/max_abs": float(magnitude.max()),
        "advantages/top_response_share": float(magnitude.max()) / total if total else 0.0,
        "train/mixed_reward_groups": float(len(mixed)),
    }


def _average(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
