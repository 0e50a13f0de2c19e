"""The actor of a server: what the server reads comes in beside its event loop, within a limit."""

import asyncio
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.errors import EngineLost
from models.ids import RunRef
from workers.actors.order import ActorOrder
from workers.actors.server import ServerActor
from workers.engines.process import ServerCommand


class Slow(ServerActor):
    """Its command is made when the store answers."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._order = ActorOrder(
            run=RunRef(run_id="train/x", root=str(folder), spec_sha256="s"),
            role="engine",
            scratch=str(folder),
            timeout_factor=2.0,
        )
        self._spec: Any = SimpleNamespace(
            launch=SimpleNamespace(download_timeout_s=limit_s),
            inference=SimpleNamespace(start_timeout_s=10.0),
        )
        self._server = self._starting = self._command = None
        self._folder = folder
        self.asked, self.answers = threading.Event(), threading.Event()

    def command(self) -> ServerCommand:
        self.asked.set()
        assert self.answers.wait(20)
        return ServerCommand(
            name="engine-0",
            argv=(sys.executable, "-c", "raise SystemExit(2)"),
            env={},
            log_path=self._folder / "log",
            ready_file=self._folder / "ready.json",
        )


async def test_others_are_answered_while_the_store_is_asked(tmp_path: Path) -> None:
    actor = Slow(tmp_path, 10.0)
    starting = asyncio.create_task(actor.start())
    assert await asyncio.to_thread(actor.asked.wait, 10)
    assert not (await asyncio.wait_for(actor.facts(), 5)).serving
    assert not starting.done()
    actor.answers.set()
    with pytest.raises(Exception, match="engine-0"):  # its server ends at once
        await asyncio.wait_for(starting, 20)


async def test_a_store_that_hangs_costs_the_limit_times_the_multiplier(tmp_path: Path) -> None:
    actor = Slow(tmp_path, 0.1)
    with pytest.raises(EngineLost, match=r"engine-0: .* 0\.2 s \(launch\.download_timeout_s\)"):
        await asyncio.wait_for(actor.start(), 10)
    actor.answers.set()


async def test_without_a_place_nothing_is_published(tmp_path: Path) -> None:
    actor = Slow(tmp_path, 10.0)
    assert await actor.publish_cache() is None
