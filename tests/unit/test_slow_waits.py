"""Waits on infrastructure: when they are told of, how the multiplier lengthens them."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import structlog

import activities.slow_waits as slow
from activities.multiplier import infra_timeout_multiplier, scaled
from activities.slow_waits import http_operation, told_while_slow
from activities.wire.client import EngineClient
from activities.wire.connection import OwnLimit
from models.errors import ConfigurationError, ServiceUnreachable


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as entries:
        yield entries


async def test_a_quick_wait_says_nothing(lines: list[Any]) -> None:
    with told_while_slow("a wait", 5.0):
        await asyncio.sleep(0)
    assert lines == []


async def test_a_slow_wait_is_told_again_and_again_and_at_its_end(
    lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, "WARN_S", 0.02)
    with told_while_slow("a wait", 60.0):
        async with asyncio.timeout(10):
            while len(lines) < 3:
                await asyncio.sleep(0.005)
    before = len(lines)
    await asyncio.sleep(0.05)

    assert [line["event"] for line in lines] == ["still waiting"] * (before - 1) + [
        "the wait is over"
    ]
    assert {(line["operation"], line["warning_s"], line["deadline_s"]) for line in lines} == {
        ("a wait", 0.02, 60.0)
    }


async def test_a_short_deadline_is_told_at_its_unscaled_length(
    lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILES_INFRA_TIMEOUT_MULTIPLIER", "5")
    assert scaled(0.01) == pytest.approx(0.05)
    with pytest.raises(TimeoutError), told_while_slow("a wait", scaled(0.01)):
        async with asyncio.timeout(scaled(0.01)):
            await asyncio.Event().wait()
    assert [line["event"] for line in lines] == ["still waiting", "the wait is over"]
    assert lines[0]["warning_s"] == pytest.approx(0.01)
    assert lines[0]["elapsed_s"] < 0.05 <= lines[0]["deadline_s"] + 1e-9


async def test_cancellation_and_errors_pass(lines: list[Any]) -> None:
    with pytest.raises(KeyError), told_while_slow("a wait", None):
        raise KeyError("x")

    async def wait() -> None:
        with told_while_slow("a wait", None):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert lines == []


@pytest.mark.parametrize("text", ["0.5", "nan", "inf", "abc"])
def test_an_impossible_multiplier_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        infra_timeout_multiplier({"MILES_INFRA_TIMEOUT_MULTIPLIER": text})


def test_operations_show_no_credentials_and_no_query() -> None:
    shown = http_operation("POST", "http://me:secret@host:81/", "/flush_cache?timeout=3")
    assert shown == "HTTP POST host:81/flush_cache"
    assert http_operation("GET", "http://[::1]:5", "/health") == "HTTP GET [::1]:5/health"


async def test_a_control_call_has_a_longer_deadline_of_its_own(
    lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    client = EngineClient("http://127.0.0.1:9", transport=httpx.MockTransport(never))
    monkeypatch.setenv("PERDURE_INFRA_TIMEOUT_MULTIPLIER", "4")
    with pytest.raises(ServiceUnreachable, match=r"within 0\.08 s"):
        await client.pause("abort", timeout_s=OwnLimit(0.02))
    with pytest.raises(ServiceUnreachable, match=r"within 0\.02 s"):
        await client.pause("abort", timeout_s=0.02)
    await client.aclose()
    assert lines[0]["operation"] == "HTTP POST 127.0.0.1:9/pause_generation"
