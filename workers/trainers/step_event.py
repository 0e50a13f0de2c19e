"""The ``optimizer`` and ``packing`` events: what one optimizer step counted, used and did."""

from collections.abc import Mapping
from typing import Any

import torch

from workers.trainers.batch import TrainingBatch
from workers.trainers.normalization import Normalization
from workers.trainers.parameter_probe import ParameterProbe
from workers.trainers.router_losses import RouterLosses
from workers.trainers.update_scores import StepWork

OPTIMIZER = "optimizer"
PACKING = "packing"

_STOPPING_MICROBATCHES = 0
"""Micro-batches of a loss that teaches when to stop, besides ``local_microbatches``: there is no
such loss."""


def optimizer_event(
    batch: TrainingBatch,
    work: StepWork,
    counts: Normalization,
    *,
    reduction: str,
    scoring_pass: str,
    policy_objective: float,
    routers: RouterLosses,
    probe: ParameterProbe | None,
    metrics: Mapping[str, float],
    lr_next: float,
    step: int,
    rollout_id: int,
    published_step: int,
    seconds: float,
) -> dict[str, Any]:
    """The values of one event, after the step was taken.

    Names with ``local`` are of this rank. ``grad_norm`` (before clipping) and ``parameter_change``
    are global, and stand beside ``mixed_reward_groups``: a step on tied rewards would have neither.

    Args:
        batch: the collection.
        work: this rank's part of the step.
        counts: what the step was divided by.
        reduction: ``training.loss_aggregation``.
        scoring_pass: where the log-probs before the update come from.
        policy_objective: this rank's part of the loss.
        routers: this rank's part of the auxiliary losses; none of a dense model has a gradient.
        probe: of a diagnostic step.
        metrics: what the step returned.
        lr_next: learning rate of the next step.
        step: number of the step, 1-based.
        rollout_id: index of the update.
        published_step: policy version that engines serve.
        seconds: wall seconds of the step.
    """
    return {
        "step": step,
        "rollout_id": rollout_id,
        "normalization": counts.as_event(),
        **routers.as_event(),
        "reduction": reduction,
        "scoring_pass": scoring_pass,
        "local_policy_objective": policy_objective,
        "local_behavior_versions": _versions(batch, work),
        "local_microbatches": len(work.micros),
        "stopping_microbatches": _STOPPING_MICROBATCHES,
        "lr_used": [metrics["train/lr_used-pg_0"]],
        "lr_next": [lr_next],
        "published_step": published_step,
        "optimizer_skipped": False,
        "elapsed_seconds": seconds,
        "mixed_reward_groups": batch.num_mixed_groups,
        "grad_norm": metrics["train/grad_norm"],
        "parameter_change": metrics["train/parameter_change"],
        "local_pre_optimizer_gradients": probe.gradients if probe else None,
        "sampled_model_updates": probe.updates() if probe else None,
    }


def packing_event(
    work: StepWork, token_budget: int, *, step: int, rollout_id: int
) -> dict[str, Any]:
    """How this rank's samples of a step were laid out; a pack is what one forward computes.

    ``fill_fraction`` is the share of the budget, in tokens fed to the model, that real tokens took.

    Args:
        work: this rank's part of the step.
        token_budget: ``trainer.micro_batch_tokens``.
        step: number of the step, 1-based.
        rollout_id: index of the update.
    """
    fed = [micro.num_input_tokens for micro in work.micros if not micro.is_filler]
    packs = work.num_packs
    return {
        "step": step,
        "rollout_id": rollout_id,
        "samples": len(work.scored),
        "packs": packs,
        "model_tokens": work.model_tokens,
        "max_pack_tokens": max(fed, default=0),
        "token_budget": token_budget,
        "fill_fraction": sum(fed) / (max(packs, 1) * token_budget),
        "samples_per_pack": len(work.scored) / max(packs, 1),
    }


def _versions(batch: TrainingBatch, work: StepWork) -> list[int]:
    """The policy versions that sampled this rank's tokens, oldest first."""
    lengths = batch.lengths
    chosen = torch.zeros(len(batch.samples), dtype=torch.bool)
    chosen[list(work.members)] = True
    versions = batch.versions.sampled_by[chosen.repeat_interleave(lengths)]
    return [int(version) for version in versions.unique().tolist()]
