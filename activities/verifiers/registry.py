"""The registry: which verifiers there are. Data names them; only this table names code."""

from collections.abc import Callable, Mapping

from activities.verifiers.base import Verifier
from activities.verifiers.exact import ExactVerifier
from activities.verifiers.gym import GymVerifier
from activities.verifiers.number import NumberVerifier
from models.errors import ConfigurationError, ContractViolation, GenerationFault
from models.prompt import PreparedPrompt
from models.sample import Verdict


def _code() -> Verifier:
    from activities.verifiers.code import FUNCTION, code_verifier  # httpx is slow to import

    return code_verifier(FUNCTION)


def _code_stdio() -> Verifier:
    from activities.verifiers.code import STDIO, code_verifier

    return code_verifier(STDIO)


REGISTRY: Mapping[str, Callable[[], Verifier]] = {
    "exact": ExactVerifier,
    "number": NumberVerifier,
    "gym": GymVerifier,
    "code": _code,
    "code_stdio": _code_stdio,
}


class VerifierSet:
    """Verifiers by name; each is made when a prompt first names it."""

    def __init__(self, factories: Mapping[str, Callable[[], Verifier]] = REGISTRY) -> None:
        self._factories = factories
        self._verifiers: dict[str, Verifier] = {}

    def require(self, name: str) -> Verifier:
        """The verifier ``name``; ``ConfigurationError`` when it is unknown or not installed."""
        if name not in self._factories:
            known = ", ".join(sorted(self._factories))
            raise ConfigurationError(f"unknown verifier {name!r}: registered are {known}")
        if name not in self._verifiers:
            self._verifiers[name] = self._factories[name]()
        return self._verifiers[name]

    async def score(self, prompt: PreparedPrompt, text: str) -> list[Verdict]:
        """One verdict a verifier of the prompt, in the prompt's order.

        Raises:
            ContractViolation: a verifier let a serving fault of its own service out. Taken for one
                of the run's engines, it would be retried for ever.
        """
        verdicts = []
        for target in prompt.metadata.verifiers:
            try:
                verdicts.append(await self.require(target.name).verify(prompt, target, text))
            except GenerationFault as fault:
                raise ContractViolation(f"verifier {target.name!r}: {fault.message}") from fault
        return verdicts

    async def aclose(self) -> None:
        """End what the verifiers started."""
        for verifier in self._verifiers.values():
            await verifier.aclose()


def build_verifiers() -> VerifierSet:
    """The registered verifiers, nothing started yet."""
    return VerifierSet()
