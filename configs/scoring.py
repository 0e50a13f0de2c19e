"""Whether the samples of a collection are scored in a forward pass of their own, and why."""

from typing import NamedTuple

from configs.run import RunSpec


class ScoringPlan(NamedTuple):
    """The scoring pass of every update of a run.

    Without one the training forward supplies the log-probs before the update, so an update must be
    one optimizer step: a second one would compute under newer weights. The KL term of the loss is
    computed from that forward as well; only a KL penalty inside rewards, which there is none of,
    would ask for log-probs before the advantages.
    """

    standalone: bool
    """Whether every update has a scoring pass over all its samples."""
    reason: str


def scoring_plan(spec: RunSpec, dropout: str | None = None) -> ScoringPlan:
    """The scoring pass that a run needs.

    Args:
        spec: the run.
        dropout: a field of the model's configuration that asks for dropout, if there is one.
    """
    if spec.core.scoring_pass_required:
        return ScoringPlan(True, "core.scoring_pass_required")
    if dropout is not None:
        return ScoringPlan(True, f"the model's {dropout} is set")
    if spec.steps_per_update != 1:
        steps = f"{spec.steps_per_update} optimizer steps share one collection"
        return ScoringPlan(True, steps)
    return ScoringPlan(False, "the training forward is under the weights before the update")
