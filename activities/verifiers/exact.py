"""``exact``: the stripped answer equals the stripped target, character by character."""

from activities.verifiers.base import invalid, score
from models.prompt import PreparedPrompt, VerifierTarget
from models.sample import Verdict


def grade(target: VerifierTarget, text: str) -> Verdict:
    """1 when ``text`` equals the target, else 0; INVALID when there is no text."""
    answer = text.strip()
    if not answer:
        return invalid(target, "empty answer")
    return score(target, float(answer == target.target.strip()))


class ExactVerifier:
    """``grade`` as a verifier."""

    async def verify(self, prompt: PreparedPrompt, target: VerifierTarget, text: str) -> Verdict:
        """The verdict on ``text``; the prompt is not needed."""
        return grade(target, text)

    async def aclose(self) -> None:
        """Nothing to end."""
