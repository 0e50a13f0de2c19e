"""Sums over the tokens of an update, in float64, and the metrics that follow from them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.errors import ContractViolation
from models.update import UpdateReport
from workers.trainers.batch import TrainingBatch
from workers.trainers.loss import LossSettings, TokenLoss
from workers.trainers.ranks import Ranks
from workers.trainers.router_losses import AuxiliaryParts

_SUMS = (
    *("tokens", "clipped", "kl", "entropy", "ratio", "ratio_squared"),
    *("tis", "tis_abs", "tis_truncated", "behavior_gap", "behavior_kl"),
)


@dataclass(slots=True)
class UpdateTally:
    """Accumulates what the loss saw, over micro-batches and optimizer steps.

    One rank's, until ``reduce``.
    """

    model_tokens: int = 0
    packs: int = 0
    packed_samples: int = 0
    ranks: int = 1
    sums: Tensor = field(default_factory=lambda: torch.zeros(len(_SUMS), dtype=torch.float64))
    step_losses: list[tuple[float, float, float]] = field(default_factory=list)
    """Total, policy and KL part of each optimizer step."""
    router_losses: list[AuxiliaryParts] = field(default_factory=list)
    """Of each optimizer step."""

    def add(
        self,
        parts: TokenLoss,
        *,
        new: Tensor,
        anchor: Tensor,
        old: Tensor,
        behavior: Tensor,
        entropy: Tensor,
    ) -> None:
        """Count the tokens of one chunk; all arguments are [n]."""
        new, entropy = new.detach(), entropy.detach()
        ratio = parts.ratio.double()
        rows = (
            torch.ones_like(new),
            parts.clipped,
            anchor - new,
            entropy,
            ratio,
            ratio * ratio,
            parts.tis,
            (parts.tis - 1).abs(),
            parts.tis_truncated,
            (old - behavior).abs(),
            behavior - old,
        )
        sums = torch.stack([row.double().sum() for row in rows])
        self.sums = self.sums.to(sums.device) + sums

    def add_packs(self, packs: int, samples: int) -> None:
        """Count what went through the model in one optimizer step."""
        self.packs += packs
        self.packed_samples += samples

    def reduce(self, ranks: Ranks) -> None:
        """Make the sums those of all ranks."""
        counts = torch.tensor([self.model_tokens, self.packs, self.packed_samples])
        losses = torch.tensor(self.step_losses, dtype=torch.float64).reshape(-1, 3)
        routers = torch.tensor(self.router_losses, dtype=torch.float64).reshape(-1, 2)
        parts = [self.sums.cpu(), counts.double(), losses, routers]
        joint = ranks.all_reduce_sum(torch.cat([part.flatten() for part in parts]))
        found = [
            part.view_as(own)
            for part, own in zip(joint.split([p.numel() for p in parts]), parts, strict=True)
        ]
        self.sums, counts, losses, routers = found
        self.router_losses = [AuxiliaryParts(*x) for x in routers.tolist()]
        self.model_tokens, self.packs, self.packed_samples = (int(x) for x in counts)
        self.ranks = ranks.world
        self.step_losses = [(total, policy, kl) for total, policy, kl in losses.tolist()]

    def metrics(self, settings: LossSettings, *, has_routers: bool) -> dict[str, float]:
        """The token-level rows of the metrics table."""
        sums = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        tokens = max(sums["tokens"], 1.0)
        squared = sums["ratio_squared"] * tokens
        total, policy, kl = (
            sum(step) / len(self.step_losses) for step in zip(*self.step_losses, strict=True)
        )
        balance, z = (
            sum(step) / len(self.router_losses) for step in zip(*self.router_losses, strict=True)
        )
        rows = {
            "train/loss": total + balance + z,
            "train/policy_objective": total,
            "train/pg_loss": policy,
            "train/entropy_loss": sums["entropy"] / tokens,
            "train/pg_clipfrac": sums["clipped"] / tokens,
            "train/ppo_kl": sums["kl"] / tokens,
            "train/ois": sums["ratio"] / tokens,
            "train/ess_ratio": sums["ratio"] ** 2 / squared if squared else 0.0,
            "train/train_rollout_logprob_abs_diff": sums["behavior_gap"] / tokens,
            "train/train_rollout_kl": sums["behavior_kl"] / tokens,
            "train/model_tokens": float(self.model_tokens),
            "train/active_response_tokens": sums["tokens"],
            "train/packing/packs_per_rank": self.packs / self.ranks,
            "train/packing/samples_per_pack": self.packed_samples / max(self.packs, 1),
            "train/packing/tokens_per_pack": self.model_tokens / max(self.packs, 1),
        }
        if has_routers:
            rows["train/auxiliary_load_balancing"] = balance
            rows["train/auxiliary_router_z"] = z
        if settings.kl_coef != 0:
            rows["train/kl_loss"] = kl
        if settings.use_tis:
            rows["train/tis"] = sums["tis"] / tokens
            rows["train/tis_abs"] = sums["tis_abs"] / tokens
            rows["train/tis_clipfrac"] = sums["tis_truncated"] / tokens
        return rows


def rate_metrics(
    model_tokens: float, active_tokens: float, seconds: float, ranks: int
) -> dict[str, float]:
    """Tokens a second of the trainer as a whole and of each of its ranks (one accelerator each).

    Raises:
        ContractViolation: no time, no ranks, or more active tokens than model tokens.
    """
    if not (seconds > 0 and ranks > 0 and model_tokens >= active_tokens >= 0):
        raise ContractViolation(
            f"no rate follows from {model_tokens} model tokens and {active_tokens} active ones in "
            f"{seconds} s on {ranks} ranks"
        )
    return {
        "train/model_tokens_per_second": model_tokens / seconds,
        "train/model_tokens_per_gpu_second": model_tokens / seconds / ranks,
        "train/active_response_tokens_per_gpu_second": active_tokens / seconds / ranks,
    }


def advantage_metrics(batch: TrainingBatch) -> dict[str, float]:
    """``advantages/*`` over the samples of a collection, and its groups with unequal rewards."""
    values = torch.tensor([sample.advantage for sample in batch.samples], dtype=torch.float64)
    magnitude = values.abs()
    total = float(magnitude.sum())
    return {
        "advantages/max": float(values.max()),
        "advantages/min": float(values.min()),
        "advantages/max_abs": float(magnitude.max()),
        "advantages/top_response_share": float(magnitude.max()) / total if total else 0.0,
        "train/mixed_reward_groups": float(batch.num_mixed_groups),
    }


def clock_metrics(report: UpdateReport, lag: int, published_step: int) -> dict[str, float]:
    """Where an update stands: steps, versions, lag, seconds, memory."""
    return {
        "train/step": float(report.policy_version - 1),
        "train/completed_steps": float(report.policy_version),
        "train/rollout_id": float(report.update),
        "train/optimizer_steps": float(report.optimizer_steps),
        "train/no_signal": float(report.no_signal),
        "train/published_step": float(published_step),
        "train/lag": float(lag),
        "train/step_seconds": report.seconds,
        "train/resident_bytes": float(report.resident_bytes),
    }
