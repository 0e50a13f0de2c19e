"""Checks between the keys of the loss in ``[training]``."""

from collections.abc import Iterator

from configs.problem import Problem
from configs.training import TrainingSection


def loss_problems(training: TrainingSection) -> Iterator[Problem]:
    """Parts of the loss that exclude each other."""
    if training.tis_clip_low > training.tis_clip:
        yield Problem(
            "training.tis_clip_low",
            f"must not exceed training.tis_clip ({training.tis_clip})",
            training.tis_clip_low,
        )
    if training.use_rollout_logprobs and training.use_tis:
        yield Problem(
            "training.use_tis",
            "importance weights correct behavior against the trainer's own log-probs, which "
            "training.use_rollout_logprobs replaces by those of the behavior",
            True,
            "set one of the two to false",
        )
    if training.dppo_divergence_type is not None:
        yield from _masked_instead_of_clipped(training)


def _masked_instead_of_clipped(training: TrainingSection) -> Iterator[Problem]:
    chosen = f"training.dppo_divergence_type = {training.dppo_divergence_type!r}"
    if training.eps_clip_c is not None:
        yield Problem(
            "training.eps_clip_c",
            f"bounds a clipped loss, and {chosen} masks tokens instead of clipping",
            training.eps_clip_c,
            "remove one of the two",
        )
    if training.advantage_estimator == "gspo":
        yield Problem(
            "training.advantage_estimator",
            f"gives a response one ratio, and {chosen} judges each token by its own probability",
            "gspo",
            'use "grpo", or remove training.dppo_divergence_type',
        )
