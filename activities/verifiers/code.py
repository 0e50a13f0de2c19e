"""``code`` and ``code_stdio``: a program in the answer, run against tests by a service.

The target is a JSON list: of statements such as ``assert add(2, 3) == 5`` for ``code``, of objects
``{"input": "...", "output": "..."}`` for ``code_stdio``. Where the service is says the environment,
because it is a matter of the place and not of the run.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from activities.verifiers.base import error, invalid
from activities.wire.code_service import CodeService, RetryPolicy, ServiceAnswer, ServiceStatus
from models.errors import ConfigurationError
from models.prompt import PreparedPrompt, VerifierTarget
from models.sample import Verdict, VerdictOutcome

SERVICE_VARIABLE = "PERDURE_CODE_SERVICE"
"""Address of the service: ``http://HOST:PORT``."""
MAX_EXECUTION_S = 1.0
"""For one test."""
PASS_THRESHOLD = 0.99
"""A program that passes a smaller share of its tests scores 0."""

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TestKind:
    """A way to test programs."""

    __test__ = False  # a name that pytest would collect

    path: str
    test: type
    """What one test is."""


FUNCTION = TestKind("/test_program", str)
STDIO = TestKind("/test_program_stdio", dict)


class CodeVerifier:
    """Runs programs at a service."""

    def __init__(self, kind: TestKind, service: CodeService) -> None:
        self._kind = kind
        self._service = service

    async def verify(self, prompt: PreparedPrompt, target: VerifierTarget, text: str) -> Verdict:
        """The verdict on ``text``; the prompt is not needed."""
        return await self.grade(target, text)

    async def grade(self, target: VerifierTarget, text: str) -> Verdict:
        """Share of the tests that the program passes, 0 below the threshold.

        A rejected program scores 0; a service that failed is an ERROR: the sample has no reward.
        """
        if not text.strip():
            return invalid(target, "empty answer")
        tests = parse_tests(target.target, self._kind)
        if isinstance(tests, str):
            return error(target, tests)
        body = {"program": program_in(text), "tests": tests}
        answer = await self._service.run(self._kind.path, body, MAX_EXECUTION_S)
        return _verdict(target, answer)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._service.aclose()


def code_verifier(
    kind: TestKind,
    environment: Mapping[str, str] | None = None,
    policy: RetryPolicy = RetryPolicy(),  # noqa: B008  a tuple
) -> CodeVerifier:
    """The verifier at the service that the environment names; see ``service_address``."""
    url = service_address(os.environ if environment is None else environment)
    return CodeVerifier(kind, CodeService(url, policy))


def service_address(environment: Mapping[str, str]) -> str:
    """Where the service is.

    Raises:
        ConfigurationError: the environment names none, or no address.
    """
    url = environment.get(SERVICE_VARIABLE, "")
    if not url:
        raise ConfigurationError(
            f"the code verifier needs a service: set {SERVICE_VARIABLE} to http://HOST:PORT, for "
            "example in [launch.env]"
        )
    return require_address(url)


def require_address(url: str) -> str:
    """``url`` when it is the address of a server, without credentials and without a query."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.username or parts.password or parts.query or parts.fragment:
        host = url.rpartition("@")[2]
        raise ConfigurationError(
            f"{host!r} is no address of a code service; write http://HOST:PORT, without credentials"
        )
    return url


def program_in(text: str) -> str:
    """The last fenced block of Python in ``text``, or all of it."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def parse_tests(target: str, kind: TestKind) -> list[Any] | str:
    """The tests that a target holds, or what is wrong with it."""
    try:
        tests = json.loads(target)
    except ValueError as problem:
        return f"the target is no JSON list of tests: {problem}"
    if not isinstance(tests, list) or not tests:
        return "the target must be a JSON list of at least one test"
    if not all(isinstance(test, kind.test) for test in tests):
        wanted = "statements" if kind is FUNCTION else "objects with input and output"
        return f"the target's tests must be {wanted}"
    return tests


def _verdict(target: VerifierTarget, answer: ServiceAnswer) -> Verdict:
    rate = answer.pass_rate
    diagnostics: dict[str, Any] = {
        "kind": "code",
        "status": answer.status.value,
        "attempts": answer.attempts,
        "http_status": answer.http_status,
    }
    if answer.status is ServiceStatus.ERROR:
        failed = error(target, answer.detail)
        return Verdict(failed.name, failed.outcome, failed.score, failed.weight, failed.detail,
                       diagnostics)  # fmt: skip
    if answer.status is ServiceStatus.OK:
        diagnostics |= {"tests": len(answer.results), "pass_rate": rate}
    passed = rate if rate >= PASS_THRESHOLD else 0.0
    return Verdict(
        target.name, VerdictOutcome.SCORE, passed, target.weight, answer.detail, diagnostics
    )
