"""A user at the command line of a workflow test, and what tests wait for there."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.load import Loaded, load_run
from workers.cli.place import Place
from workers.cli.server import look, progress_of
from workers.cli.session import Session


class Desk:
    """A user at the command line: a run file, and a server address."""

    def __init__(self, stage: Any, folder: Path) -> None:
        self.stage = stage
        self.place = Place(stage.client.service_client.config.target_host)
        self.file = folder / "run.json"

    def loaded(self, *overrides: str, **sections: dict[str, Any]) -> Loaded:
        self.file.write_text(json.dumps(self.stage.document(**sections)))
        return load_run(self.file, overrides)

    async def run(self, loaded: Loaded, *, follow: bool = True, as_json: bool = True) -> int:
        session = Session(
            loaded, self.place, again=[str(self.file)], as_json=as_json, take_over=False
        )
        return await asyncio.wait_for(session.run(follow=follow), 40)


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The document that a command ended with."""
    # Activities of the worker in this process log to the same standard output.
    line: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return line


async def asks(desk: Desk, state: str) -> bool:
    """Whether the run of ``desk`` is in ``state``."""
    run_id = f"train/{desk.stage.name}"
    if await look(desk.stage.client, run_id) is None:
        return False
    progress = await progress_of(desk.stage.client, run_id)
    return progress is not None and progress.state == state


async def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Poll ``condition`` until it holds."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.05)
