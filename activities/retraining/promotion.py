"""The rule of promotion: pure, and worded with its numbers."""

from models.retraining import Comparison, Decision

DIGITS = 6


def judge(comparison: Comparison) -> tuple[Decision, str]:
    """Promote unless the candidate is worse than its parent by more than the tolerance.

    Also refused: an evaluation that is missing or has too many unscored samples. Values are
    compared as they are; equal ones do not regress.
    """
    name, tolerance = comparison.metric, comparison.tolerance
    parent, candidate = comparison.parent, comparison.candidate
    for whose, value, share in (
        ("parent", parent, comparison.parent_unscored),
        ("candidate", candidate, comparison.candidate_unscored),
    ):
        if value is None or share is None:
            return Decision.REFUSED, f"the evaluation of the {whose} has no {name}"
        if share > comparison.max_unscored_fraction:
            return Decision.REFUSED, (
                f"{share:.1%} of the {whose}'s held-out samples have no score, "
                f"{comparison.max_unscored_fraction:.1%} are allowed"
            )
    assert parent is not None
    assert candidate is not None
    loss = parent - candidate if comparison.higher_is_better else candidate - parent
    numbers = (
        f"{name} {_shown(candidate)} after {_shown(parent)}, "
        f"{'worse' if loss > 0 else 'better'} by {_shown(abs(loss))}, tolerance {tolerance:g}, "
        f"n = {comparison.samples}"
    )
    if loss > tolerance:
        return Decision.REFUSED, f"regression: {numbers}"
    return Decision.PROMOTED, numbers


def _shown(value: float) -> str:
    return f"{round(value, DIGITS):g}"
