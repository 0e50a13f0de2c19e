"""``number``: the last number in the answer equals the target, as exact decimals (18 = 18.00)."""

import re
from collections.abc import Iterator
from decimal import Decimal

from activities.verifiers.base import error, invalid, score
from models.prompt import PreparedPrompt, VerifierTarget
from models.sample import Verdict

_GROUPING_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9])")
# A sign counts unless it follows a word, a digit or a bracket: "x = -5" is -5, "8-5" ends in 5.
_NUMBER = re.compile(r"(?:(?<![\w)\].])[-+])?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
_MINUS_SIGN = "\N{MINUS SIGN}"


def last_number(text: str) -> Decimal | None:
    """The last decimal number in ``text``; commas between digits are dropped first."""
    last = None
    for last in _numbers(text):  # noqa: B007  keeping the final match is the point
        pass
    return None if last is None else Decimal(last.group())


def count_numbers(text: str) -> int:
    """How many numbers ``last_number`` chooses from: two in ``3/4`` and in ``1e-5``."""
    return sum(1 for _ in _numbers(text))


def _numbers(text: str) -> Iterator[re.Match[str]]:
    return _NUMBER.finditer(_GROUPING_COMMA.sub("", text.replace(_MINUS_SIGN, "-")))


def grade(target: VerifierTarget, text: str) -> Verdict:
    """1 when the last number equals the target, else 0; INVALID when there is no number."""
    expected = last_number(target.target)
    if expected is None:
        return error(target, f"target {target.target!r} is not a number")
    found = last_number(text)
    if found is None:
        return invalid(target, "no number in the answer")
    return score(target, float(found == expected))


class NumberVerifier:
    """``grade`` as a verifier."""

    async def verify(self, prompt: PreparedPrompt, target: VerifierTarget, text: str) -> Verdict:
        """The verdict on ``text``; the prompt is not needed."""
        return grade(target, text)

    async def aclose(self) -> None:
        """Nothing to end."""
