"""How our client of a code service behaves when the service fails, shown against a live one.

A proxy on loopback puts faults before the service; requests that it lets through run small
programs there. So the cases show the client's retries and the service's answers, and nothing about
the service's own failures.
"""

import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from activities.verifiers.code import FUNCTION, MAX_EXECUTION_S, STDIO, CodeVerifier, TestKind
from activities.wire.code_service import CodeService, RetryPolicy
from models.prompt import VerifierTarget
from models.sample import Verdict, VerdictOutcome
from workers.preflight.fault_proxy import Fault, FaultProxy

LIMITS = (
    "faults are injected on loopback: how the service itself fails or recovers is not shown",
    "one request at a time: neither its capacity nor its queue is tested",
    f"programs of a few milliseconds: its time-outs are not tested (a test may take "
    f"{MAX_EXECUTION_S:g} s)",
)
_TRANSIENT = (503, 502, 504)
_ANSWERS = {
    FUNCTION: (
        "```python\ndef add(a, b):\n    return a + b\n```",
        '["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]',
    ),
    STDIO: (
        "```python\nprint(int(input()) * 2)\n```",
        '[{"input": "21\\n", "output": "42\\n"}]',
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is injected, and what must be seen then."""

    name: str
    kind: TestKind
    faults: tuple[Fault, ...]
    attempts: int
    forwarded: int
    score: float | None
    """None: no score, the sample has no reward."""
    status: str


@dataclass(frozen=True, slots=True)
class CaseReport:
    """What was seen."""

    name: str
    passed: bool
    attempts: int
    forwarded: int
    seconds: float
    score: float | None
    diagnostics: dict[str, Any]
    error: str | None
    """The verifier's own error."""


def cases(policy: RetryPolicy) -> tuple[Case, ...]:
    """Every case, in order."""
    retries = policy.budget
    transient = tuple(Fault(_TRANSIENT[n % len(_TRANSIENT)]) for n in range(min(retries, 3)))
    tried = len(transient) + 1
    return (
        Case("transient_function", FUNCTION, transient, tried, 1, 1.0, "ok"),
        Case("transient_stdio", STDIO, transient, tried, 1, 1.0, "ok"),
        Case("exhausted", FUNCTION, (Fault(503),) * (retries + 1), retries + 1, 0, None,
             "service_error"),
        Case("healthy_after", FUNCTION, (), 1, 1, 1.0, "ok"),
        Case("rate_limited", FUNCTION, (Fault(429, "0"),), 2, 1, 1.0, "ok"),
        Case("rejected", FUNCTION, (Fault(500),), 1, 0, 0.0, "rejected"),
    )  # fmt: skip


async def probe(
    url: str, policy: RetryPolicy, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[tuple[Case, CaseReport]]:
    """Each case and what was seen of it; ends after the first that failed."""
    with FaultProxy(url).running() as proxy:
        service = CodeService(proxy.url, policy)
        try:
            for case in cases(policy):
                proxy.plan(case.faults)
                started = clock()
                verdict = await _verdict(case.kind, service)
                report = _seen(case, verdict, proxy, clock() - started)
                yield case, report
                if not report.passed:
                    return
        finally:
            await service.aclose()


async def _verdict(kind: TestKind, service: CodeService) -> Verdict:
    text, tests = _ANSWERS[kind]
    target = VerifierTarget(name="code", target=tests)
    return await CodeVerifier(kind, service).grade(target, text)


def _seen(case: Case, verdict: Verdict, proxy: FaultProxy, seconds: float) -> CaseReport:
    score = None if math.isnan(verdict.score) else verdict.score
    failed = verdict.outcome is VerdictOutcome.ERROR
    status = verdict.diagnostics.get("status")
    return CaseReport(
        name=case.name,
        passed=(
            (proxy.attempts, proxy.forwarded, score, status)
            == (case.attempts, case.forwarded, case.score, case.status)
        ),
        attempts=proxy.attempts,
        forwarded=proxy.forwarded,
        seconds=round(seconds, 3),
        score=score,
        diagnostics=verdict.diagnostics,
        error=verdict.detail if failed else None,
    )
