"""The engine actor without Ray: one server, however often it is asked to start."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from models.ids import RunRef
from workers.actors import engine, server
from workers.actors.engine import EngineActor
from workers.actors.order import ActorOrder


class Inference:
    start_timeout_s = 5.0


class Launch:
    download_timeout_s = 5.0


class Spec:
    inference, launch = Inference(), Launch()


class Server:
    """Stands in for a server process."""

    pid, alive, url = 1, True, "http://127.0.0.1:9"


async def test_a_call_that_is_repeated_while_it_runs_starts_no_second_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's driver repeats a call whose fate it does not know, after a broken connection."""
    started: list[Any] = []
    ready = asyncio.Event()

    async def start(command: object, timeout_s: float) -> Server:
        started.append(command)
        await ready.wait()
        return Server()

    monkeypatch.setattr(server, "spec_of", lambda run: Spec())
    monkeypatch.setattr(engine, "server_command", lambda order, spec: "command")
    monkeypatch.setattr(server.ServerProcess, "start", start)
    run = RunRef(run_id="train/x", root=str(tmp_path), spec_sha256="s")
    actor = EngineActor(ActorOrder(run=run, role="engine", scratch=str(tmp_path)))
    calls = [asyncio.create_task(actor.start()) for _ in range(2)]
    await asyncio.sleep(0)
    calls[0].cancel()
    ready.set()
    facts = await asyncio.wait_for(calls[1], 10)
    assert facts.status.url == "http://127.0.0.1:9"
    assert started == ["command"]
