"""The code verifier and its client: what is sent, sent again, and made of an answer."""

import asyncio
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from activities.verifiers.code import (
    FUNCTION,
    SERVICE_VARIABLE,
    STDIO,
    CodeVerifier,
    code_verifier,
    parse_tests,
    program_in,
)
from activities.verifiers.registry import REGISTRY
from activities.wire.code_service import CodeService, RetryPolicy, request_timeout_s
from configs.load import resolve_document
from models.errors import ConfigurationError
from models.prompt import VerifierTarget
from models.sample import Verdict, VerdictOutcome
from workers.sources.inputs import find_input_problems
from workers.sources.rows import jsonl_rows

TARGET = VerifierTarget(name="code", target='["assert f(1) == 1"]', weight=0.5)
Reply = httpx.Response | Exception


class Service:
    """A scripted service; keeps what it was sent, and how long the client paused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *replies: Reply) -> None:
        self.replies = list(replies)
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.pauses: list[float] = []
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        self.bodies.append(json.loads(request.content))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def grade(self, text: str = "def f(x): return x", **fields: Any) -> Verdict:
        service = CodeService("http://code", RetryPolicy(), httpx.MockTransport(self._answer))
        verifier = CodeVerifier(fields.pop("kind", FUNCTION), service)
        verdict = await verifier.grade(fields.pop("target", TARGET), text)
        await verifier.aclose()
        return verdict


def ok(*results: Any) -> httpx.Response:
    return httpx.Response(200, json={"results": list(results)})


@pytest.mark.parametrize(
    ("results", "score"),
    [
        ([True], 1.0),
        ([1, 1.0], 1.0),
        ([True, False], 0.0),
        ([], 0.0),
        ([True] * 99 + [False], 0.99),
        ([True] * 98 + [False, False], 0.0),
    ],
)
async def test_the_score_is_the_share_of_passed_tests_above_the_threshold(
    monkeypatch: pytest.MonkeyPatch, results: list[Any], score: float
) -> None:
    verdict = await Service(monkeypatch, ok(*results)).grade()
    assert (verdict.outcome, verdict.score, verdict.weight) == (VerdictOutcome.SCORE, score, 0.5)


@pytest.mark.parametrize(
    ("replies", "status", "attempts", "pauses"),
    [
        ([503, 502, 504, "ok"], "ok", 4, [1, 2, 4]),
        ([503, 503, 503, 503], "service_error", 4, [1, 2, 4]),
        ([httpx.ConnectError("refused"), "ok"], "ok", 2, [1]),
        ([httpx.ReadTimeout("slow")] * 4, "service_error", 4, [1, 2, 4]),
        ([(429, "0"), "ok"], "ok", 2, [0]),
        ([(503, "7"), "ok"], "ok", 2, [7]),
        ([(429, "3600"), "ok"], "ok", 2, [30]),
        ([429], "service_error", 1, []),
        ([(429, "0")] * 4, "service_error", 4, [0, 0, 0]),
        ([500], "rejected", 1, []),
        ([400], "rejected", 1, []),
        ([404], "rejected", 1, []),
        ([501], "service_error", 1, []),
        ([302], "service_error", 1, []),
        (["no list"], "service_error", 1, []),
        (["no json"], "service_error", 1, []),
        (["too much"], "service_error", 1, []),
    ],
)
async def test_what_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
    replies: list[Any],
    status: str,
    attempts: int,
    pauses: list[float],
) -> None:
    named: dict[str, Callable[[], httpx.Response]] = {
        "ok": lambda: ok(True),
        "no list": lambda: httpx.Response(200, json={"results": "all"}),
        "no json": lambda: httpx.Response(200, text="fine"),
        "too much": lambda: ok(2),
    }

    def reply(each: Any) -> Reply:
        if isinstance(each, str):
            return named[each]()
        if isinstance(each, Exception):
            return each
        code, wait = each if isinstance(each, tuple) else (each, None)
        return httpx.Response(code, headers={} if wait is None else {"retry-after": wait})

    service = Service(monkeypatch, *map(reply, replies))
    verdict = await service.grade()
    assert verdict.diagnostics["status"] == status
    assert verdict.diagnostics["attempts"] == attempts == len(service.bodies)
    assert service.pauses == pauses
    if status == "service_error":
        assert verdict.outcome is VerdictOutcome.ERROR
        assert math.isnan(verdict.score)
    else:
        assert verdict.score == (1.0 if status == "ok" else 0.0)


async def test_a_service_may_name_the_date_of_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    due = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    again = httpx.Response(429, headers={"retry-after": due})
    service = Service(monkeypatch, again, ok(True))
    assert (await service.grade()).score == 1.0
    assert 10 < service.pauses[0] <= 20


async def test_program_tests_and_limit_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch, ok(True))
    text = "first\n```python\nx = 1\n```\nbetter\n```python\nx = 2\n```\n"
    target = VerifierTarget(name="code_stdio", target='[{"input": "", "output": "2"}]')
    await service.grade(text, kind=STDIO, target=target)
    assert service.paths == ["/test_program_stdio"]
    assert service.bodies == [
        {"program": "x = 2\n", "tests": [{"input": "", "output": "2"}], "max_execution_time": 1.0}
    ]


@pytest.mark.parametrize(
    ("limit_s", "timeout_s"), [(0.5, 30.0), (1.0, 30.0), (5.0, 50.0), (60.0, 300.0)]
)
def test_an_attempt_may_take_ten_times_a_program(limit_s: float, timeout_s: float) -> None:
    assert request_timeout_s(limit_s) == timeout_s


def test_the_longest_wait_is_two_minutes() -> None:
    policy = RetryPolicy()
    pauses = [policy.pause_s(retry) for retry in range(1, policy.budget + 1)]
    assert (policy.budget + 1) * request_timeout_s(1.0) + sum(pauses) == 127.0


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "```python\nx = 1"),
    ],
)
def test_the_program_in_an_answer(text: str, program: str) -> None:
    assert program_in(text) == program


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("{", "no JSON list"),
        ("[]", "at least one test"),
        ('{"a": 1}', "at least one test"),
        ('[{"input": "", "output": ""}]', "must be statements"),
    ],
)
async def test_a_wrong_target_is_an_error_and_not_sent(
    monkeypatch: pytest.MonkeyPatch, target: str, problem: str
) -> None:
    service = Service(monkeypatch)
    verdict = await service.grade(target=VerifierTarget(name="code", target=target))
    assert verdict.outcome is VerdictOutcome.ERROR
    assert problem in verdict.detail
    assert service.bodies == []
    assert parse_tests('["assert True"]', STDIO) == (
        "the target's tests must be objects with input and output"
    )


async def test_an_empty_answer_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch)
    assert (await service.grade("  \n")).outcome is VerdictOutcome.INVALID
    assert service.bodies == []


@pytest.mark.parametrize("name", ["code", "code_stdio"])
def test_the_environment_says_where_the_service_is(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(SERVICE_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=f"set {SERVICE_VARIABLE}"):
        REGISTRY[name]()
    monkeypatch.setenv(SERVICE_VARIABLE, "http://code:1234")
    assert isinstance(REGISTRY[name](), CodeVerifier)
    with pytest.raises(ConfigurationError, match="without credentials"):
        code_verifier(FUNCTION, {SERVICE_VARIABLE: "http://a:b@code:1234"})


@pytest.mark.parametrize(
    ("verifier", "answer", "problem"),
    [
        ("code", "4", "code: the target must be a JSON list of at least one test"),
        ("code", '[{"input": "", "output": ""}]', "code: the target's tests must be statements"),
        ("code_stdio", '["assert True"]', "code_stdio: the target's tests must be objects"),
    ],
)
def test_a_row_without_tests_is_refused(verifier: str, answer: str, problem: str) -> None:
    row = {"prompt": "p", "answer": answer, "verifier": verifier}
    with pytest.raises(ConfigurationError, match=f"rows line 1: {problem}"):
        jsonl_rows("rows", json.dumps(row).encode(), "exact")
    good = '["assert True"]' if verifier == "code" else '[{"input": "", "output": ""}]'
    assert jsonl_rows("rows", json.dumps({**row, "answer": good}).encode(), "exact")


def test_validate_asks_for_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SERVICE_VARIABLE, raising=False)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "p", "answer": '["assert True"]', "verifier": "code"}))
    document: dict[str, Any] = {
        "schema_version": 1,
        "name": "code",
        "model": {"source": "tiny", "tiny": {"warmup_accuracy": 0.0}},
        "data": {"prompt_data": str(rows)},
        "output": {"root": str(tmp_path / "root")},
    }
    (problem,) = find_input_problems(resolve_document(document, origin="run").spec)
    assert f"set {SERVICE_VARIABLE}" in str(problem)
    document["launch"] = {"env": {SERVICE_VARIABLE: "http://code:1234"}}
    assert find_input_problems(resolve_document(document, origin="run").spec) == []
