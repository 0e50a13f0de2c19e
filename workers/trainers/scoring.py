"""Log-probs before the update: from a scoring pass, or from the training forward itself.

A training forward that computed something else than a scoring pass would make every ratio wrong
in silence. So where the pass is skipped, both are computed now and then and compared before any
weight changes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from configs.run import RunSpec
from configs.scoring import ScoringPlan, scoring_plan
from models.errors import PolicyDisagreement
from workers.trainers.logprobs import Scorer
from workers.trainers.packing import MicroBatch
from workers.trainers.ranks import Ranks

SCORING_CHECK = "scoring_check"
SCORE_TIMING = "score_timing"

STANDALONE = "standalone"
CHECKED = "checked"
SKIPPED = "skipped"
TRAINING_FORWARD = "training_forward"

_EDGE = 1e-3  # nats; gaps above it are counted


class ScoringDecision:
    """What is scored in this process's next update, and whether the two ways are compared."""

    def __init__(self, spec: RunSpec, model_config: Any) -> None:
        """``model_config``: the transformers configuration; a dropout in it forces the pass."""
        self.plan: ScoringPlan = scoring_plan(spec, _dropout_field(model_config))
        self._interval = spec.core.scoring_check_interval
        self._checked = False

    def check_due(self, completed_steps: int) -> bool:
        """Whether an update that begins after ``completed_steps`` compares both ways."""
        if self.plan.standalone:
            return False
        on_interval = self._interval > 0 and completed_steps % self._interval == 0
        return on_interval or not self._checked

    def checked(self) -> None:
        """An update of this process compared both ways."""
        self._checked = True


def score_into(target: Tensor, scorer: Scorer, micros: Sequence[MicroBatch]) -> int:
    """Write the log-probs of every token of ``micros`` into ``target`` [N].

    Returns:
        The model tokens of the pass.
    """
    for micro in micros:
        logprobs, _ = scorer.score(micro)
        target[micro.token_index.to(target.device)] = logprobs
    return sum(micro.num_model_tokens for micro in micros)


def scoring_check(
    standalone: Tensor, training: Tensor, ranks: Ranks, *, rollout_id: int, tolerance: float
) -> dict[str, Any]:
    """Compare two scorings of the same tokens; the values of a ``scoring_check`` event.

    Args:
        standalone: [N] of the scoring pass; NaN where it did not look.
        training: [N] of the training forward; NaN where it did not look, or where masked.
        ranks: who else compares.
        rollout_id: index of the update.
        tolerance: ``core.scoring_check_tolerance``.
    """
    both = ~(standalone.isnan() | training.isnan())
    gap = (standalone[both].double() - training[both].double()).abs().cpu()
    largest = gap.max() if len(gap) else torch.zeros((), dtype=torch.float64)
    own = torch.stack([gap.new_tensor(len(gap)), gap.sum(), (gap > _EDGE).sum().double()])
    count, total, above = ranks.all_reduce_sum(own).tolist()
    return {
        "rollout_id": rollout_id,
        "active_tokens": int(count),
        "mean_abs": total / max(count, 1.0),
        "max_abs": float(ranks.all_reduce_max(largest)),
        "tokens_above_edge": int(above),
        "edge": _EDGE,
        "tolerance": tolerance,
    }


def refuse_scoring_gap(event: dict[str, Any]) -> None:
    """Raise when a check found more than its tolerance.

    Raises:
        PolicyDisagreement: the training forward does not compute what a scoring pass does.
    """
    if event["mean_abs"] > event["tolerance"]:
        raise PolicyDisagreement(
            f"scoring pass and training forward differ by {event['mean_abs']:.4g} nats a token in "
            f"the mean (largest {event['max_abs']:.4g}, {event['active_tokens']} tokens), above "
            f"core.scoring_check_tolerance = {event['tolerance']:.4g}: the log-probs before the "
            "update cannot be taken from the training forward; set core.scoring_pass_required, or "
            "find what makes this model's forward depend on its batch"
        )


def _dropout_field(config: Any) -> str | None:
    """The first truthy field of a model's configuration whose name has dropout in it."""
    fields = config.to_dict()
    return next((name for name in sorted(fields) if "dropout" in name and fields[name]), None)
