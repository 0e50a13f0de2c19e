"""What a verifier is: a function of (prompt, target, answer) with three outcomes.

A score, an invalid answer (nothing readable: score 0) and an error (the verifier failed: no score)
are never mixed up. Verifiers use no signals, so they behave the same in every thread and process.
"""

import math
from collections.abc import Sequence
from typing import Protocol

from models.prompt import PreparedPrompt, VerifierTarget
from models.sample import Verdict, VerdictOutcome


class Verifier(Protocol):
    """Scores one answer. Never raises for what an answer holds."""

    async def verify(self, prompt: PreparedPrompt, target: VerifierTarget, text: str) -> Verdict:
        """The verdict on ``text``, within the verifier's own time budget."""
        ...

    async def aclose(self) -> None:
        """End what the verifier started."""
        ...


def score(target: VerifierTarget, value: float, detail: str = "") -> Verdict:
    """A SCORE verdict, or an ERROR when ``value`` is not a number in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        return error(target, f"score {value} is outside [0, 1]")
    return Verdict(target.name, VerdictOutcome.SCORE, float(value), target.weight, detail)


def invalid(target: VerifierTarget, detail: str) -> Verdict:
    """An INVALID verdict: the answer could not be read and counts as 0."""
    return Verdict(target.name, VerdictOutcome.INVALID, 0.0, target.weight, detail)


def error(target: VerifierTarget, detail: str) -> Verdict:
    """An ERROR verdict: the verifier failed and the sample has no reward."""
    return Verdict(target.name, VerdictOutcome.ERROR, math.nan, target.weight, detail)


def truncated(target: VerifierTarget) -> Verdict:
    """Score 0 for a response that was cut at the token limit, not graded at all."""
    return Verdict(
        target.name,
        VerdictOutcome.SCORE,
        0.0,
        target.weight,
        "cut at the token limit",
        {"reward_gate": "truncated"},
    )


def total_reward(verdicts: Sequence[Verdict]) -> float:
    """Sum of weight x score; NaN when a verifier failed or the sum is not finite."""
    if not verdicts or any(each.outcome is VerdictOutcome.ERROR for each in verdicts):
        return math.nan
    total = math.fsum(each.weight * each.score for each in verdicts)
    return total if math.isfinite(total) else math.nan
