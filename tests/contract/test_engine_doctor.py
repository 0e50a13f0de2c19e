"""``perdure doctor engine``: what it says of real engines, of spoiled answers, and of nobody."""

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from activities.wire.probe import EngineProbe
from tests.support.served_engine import ServedEngine
from workers.preflight.engine import INFORMATION, Report, examine
from workers.preflight.engine_generation import GENERATION
from workers.preflight.engine_refusals import REFUSALS

DEADLINE_S = 50.0


async def doctor(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "workers", "doctor", "engine", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


async def test_an_engine_meets_the_contract_and_is_left_as_it_was(any_engine: ServedEngine) -> None:
    before = (await any_engine.http.get("/model_info")).json()
    done = await doctor(any_engine.url, "--json")
    report: dict[str, Any] = json.loads(done.stdout)
    assert [row for row in report["findings"] if row["ok"] is not True] == []
    assert done.returncode == 0, done.stderr
    assert (report["passed"], report["failed"]) == (22, 0)
    assert (await any_engine.http.get("/model_info")).json() == before
    await any_engine.until_load(running=0)
    table = await doctor(any_engine.url)
    assert table.returncode == 0
    assert table.stdout.splitlines()[-1].endswith("checks met")
    assert "generate by token ids" in table.stdout


Spoil = Callable[[dict[str, Any]], None]


class Spoiled(httpx.AsyncBaseTransport):
    """Hands requests to a real engine and spoils its JSON answers on one path."""

    def __init__(self, path: str, spoil: Spoil) -> None:
        self.path, self.spoil = path, spoil
        self.inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self.inner.handle_async_request(request)
        content = await answer.aread()
        if request.url.path == self.path and content.startswith(b"{"):
            body = json.loads(content)
            self.spoil(body)
            content = json.dumps(body).encode()
        return httpx.Response(answer.status_code, content=content, request=request)

    async def aclose(self) -> None:
        await self.inner.aclose()


def meta(change: Callable[[dict[str, Any]], None]) -> Spoil:
    """``change`` of ``meta_info``, where there is one."""
    return lambda body: change(body["meta_info"]) if "meta_info" in body else None


def without_a_token(body: dict[str, Any]) -> None:
    if "output_ids" in body:
        body["output_ids"] = body["output_ids"][:-1]


def each_logprob(value: Callable[[float], float]) -> Spoil:
    def change(info: dict[str, Any]) -> None:
        for entry in info.get("output_token_logprobs", ()):
            entry[0] = value(entry[0])

    return meta(change)


def of_other_tokens(info: dict[str, Any]) -> None:
    for entry in info.get("output_token_logprobs", ()):
        entry[1] += 1


def without_a_row(info: dict[str, Any]) -> None:
    if "routed_experts" in info:
        info["routed_experts"] = info["routed_experts"][:-4]


SPOILED: dict[str, tuple[str, Spoil, set[str]]] = {
    "a token is missing": ("/generate", without_a_token, {"generate by token ids", "log-probs"}),
    "another version": (
        "/generate",
        meta(lambda info: info.update(weight_version="x")),
        {"version of an answer"},
    ),
    "another id": ("/generate", meta(lambda info: info.update(id="x")), {"generate by token ids"}),
    "log-probs of other tokens": ("/generate", meta(of_other_tokens), {"log-probs"}),
    "log-probs that are none": ("/generate", each_logprob(lambda _: math.nan), {"log-probs"}),
    "a uniform distribution": (
        "/generate",
        each_logprob(lambda _: -math.log(320)),
        {"log-probs differ", "scoring agrees with sampling"},
    ),
    "other weights at scoring": (
        "/generate",
        each_logprob(lambda value: value - 0.2),
        {"scoring agrees with sampling"},
    ),
    "routes cut off": ("/generate", meta(without_a_row), {"routed experts"}),
    "a refusal of another shape": (
        "/generate",
        lambda body: body.pop("error", None),
        {"no token", "temperature -1"},
    ),
    "no version": ("/model_info", lambda body: body.pop("weight_version"), {"model_info"}),
    "no longest input": (
        "/server_info",
        lambda body: body.pop("max_req_input_len"),
        {"server_info"},
    ),
    "no load": ("/v1/loads", lambda body: body["loads"].clear(), {"loads"}),
}


@pytest.mark.parametrize("name", SPOILED)
async def test_a_spoiled_answer_is_found(engine: ServedEngine, name: str) -> None:
    path, spoil, expected = SPOILED[name]
    report = await examined(engine, Spoiled(path, spoil))
    failed = {finding.check for finding in report.findings if finding.ok is False}
    assert expected <= failed
    untouched = {"health", "abort of an unknown id", "unknown path", "a body that is no JSON"}
    assert not untouched & failed


async def examined(engine: ServedEngine, transport: httpx.AsyncBaseTransport) -> Report:
    probe = EngineProbe(engine.url, timeout_s=DEADLINE_S, transport=transport)
    try:
        return await examine(probe, (*INFORMATION, *GENERATION, *REFUSALS))
    finally:
        await probe.aclose()


async def test_a_paused_engine_fails_what_generates_and_nothing_else(engine: ServedEngine) -> None:
    await engine.http.post("/pause_generation", json={"mode": "abort"})
    done = await doctor(engine.url, "--json", "--timeout", "0.3")
    report = json.loads(done.stdout)
    failed = {row["check"] for row in report["findings"] if row["ok"] is False}
    assert done.returncode == 1
    assert "generate by token ids" in failed
    assert not {"model_info", "server_info", "loads", "no token", "unknown path"} & failed


async def test_nobody_and_no_address(unused_tcp_port: int) -> None:
    nobody = await doctor(f"http://127.0.0.1:{unused_tcp_port}")
    assert nobody.returncode == 3
    assert "GET /model_info had no answer" in nobody.stderr
    for address in ("localhost", "http://host:x"):
        wrong = await doctor(address)
        assert wrong.returncode == 2
        assert "is no address of a server" in wrong.stderr
