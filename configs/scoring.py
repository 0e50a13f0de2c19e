"""Which samples of a collection are scored in a forward pass of their own, and why."""

from typing import Literal, NamedTuple

from configs.run import RunSpec


class ScoringPlan(NamedTuple):
    """The scoring pass of every update of a run.

    The training forward of an update's first optimizer step happens under the weights before the
    update, so its log-probs can stand for those of a scoring pass. Later steps compute under newer
    weights: their samples are always scored before the first one.
    """

    covers: Literal["all", "later_steps", "nothing"]
    reason: str

    @property
    def standalone(self) -> bool:
        """Whether every update has a scoring pass."""
        return self.covers != "nothing"


def scoring_plan(spec: RunSpec, dropout: str | None = None) -> ScoringPlan:
    """The scoring pass that a run needs.

    Args:
        spec: the run.
        dropout: a field of the model's configuration that asks for dropout, if there is one.
    """
    if spec.core.scoring_pass_required:
        return ScoringPlan("all", "core.scoring_pass_required")
    if dropout is not None:
        return ScoringPlan("all", f"the model's {dropout} is set")
    if spec.steps_per_update != 1:
        return ScoringPlan(
            "later_steps", f"{spec.steps_per_update} optimizer steps share one collection"
        )
    return ScoringPlan("nothing", "the training forward is under the weights before the update")
