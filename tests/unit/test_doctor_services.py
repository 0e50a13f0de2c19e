"""``perdure doctor services``: faults in front of a service that really runs programs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.code_service import code_service
from workers.cli import output
from workers.cli.app import run_command

EXPECTED = {
    "transient_function": (4, 1, 1.0, "ok"),
    "transient_stdio": (4, 1, 1.0, "ok"),
    "exhausted": (4, 0, None, "service_error"),
    "healthy_after": (1, 1, 1.0, "ok"),
    "rate_limited": (2, 1, 1.0, "ok"),
    "rejected": (1, 0, 0.0, "rejected"),
}
"""Attempts, those of them that reached the service, score, status."""
FIELDS = {
    "name", "passed", "attempts", "forwarded", "seconds", "score", "diagnostics", "error",
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_consoles() -> Iterator[None]:
    output.out.cache_clear()
    output.err.cache_clear()
    yield
    output.out.cache_clear()
    output.err.cache_clear()


def examine(*words: str) -> int:
    return run_command(["doctor", "services", *words, "--backoff", "0.01"])


def printed_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_case_shows_its_attempts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_file = tmp_path / "reports" / "services.json"
    with code_service() as url:
        assert examine(url, "--output", str(report_file)) == 0
    report = json.loads(report_file.read_text())
    assert set(report) == {
        "passed", "retry_budget", "backoff_factor", "upstream", "cases", "limits",
    }  # fmt: skip
    assert (report["passed"], report["retry_budget"], report["upstream"]) == (True, 3, url)
    assert report["backoff_factor"] == 0.01
    assert report["limits"]
    found = {
        case["name"]: (
            case["attempts"],
            case["forwarded"],
            case["score"],
            case["diagnostics"]["status"],
        )
        for case in report["cases"]
    }
    assert found == EXPECTED
    assert all(set(case) == FIELDS and case["passed"] for case in report["cases"])
    assert [bool(case["error"]) for case in report["cases"]] == [
        case["name"] == "exhausted" for case in report["cases"]
    ]
    assert report["cases"][0]["seconds"] >= 0.01 + 0.02 + 0.04
    assert printed_lines(capsys.readouterr().out) == report["cases"]


def test_the_first_failed_case_ends_it_without_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with code_service(broken=True) as url:
        assert examine(url, "--output", str(tmp_path / "services.json")) == 1
    printed = capsys.readouterr()
    (line,) = printed_lines(printed.out)
    assert (line["name"], line["passed"], line["score"]) == ("transient_function", False, 0.0)
    assert "expected 4 attempts, 1 of them at the service, score 1.0, status ok" in printed.err
    assert not (tmp_path / "services.json").exists()


def test_a_service_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with code_service() as url:
        pass
    assert examine(url) == 1
    printed = capsys.readouterr()
    (line,) = printed_lines(printed.out)
    assert line["diagnostics"] == {
        "kind": "code",
        "status": "service_error",
        "attempts": 4,
        "http_status": 502,
    }
    assert f"{url} does not answer" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["localhost:1234"], "is no address of a code service"),
        (["http://user:secret@host:1"], "'host:1' is no address of a code service"),
        (["http://host:1", "--output", "."], "--output .: is a folder"),
        (["http://host:1", "--backoff", "-1"], "--backoff -1.0"),
    ],
)
def test_bad_arguments_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["doctor", "services", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "secret" not in printed.err
