"""A fork is started by its verb and goes on from the checkpoint under its own name."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from activities.storage import layout
from tests.support.desk import Desk, until
from workers.cli.app import run_command
from workers.cli.errors import DONE
from workers.cli.server import look, progress_of

pytestmark = pytest.mark.workflow


async def test_a_fork_of_a_run_that_goes_on_is_a_run_of_its_own(
    make_stage: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_LAUNCH_RECEIPTS", str(tmp_path / "launches"))
    parent, child = await make_stage(), await make_stage()
    desk = Desk(parent, tmp_path)
    loaded = desk.loaded(training={"num_rollouts": 4}, core={"checkpoint_keep_last": None})
    gate = parent.fleet.script.hold("collect 3")
    await desk.run(loaded, follow=False)
    await parent.fleet.script.reached("collect 3")
    words = ["fork", parent.name, "--at", "2", "--to", str(child.root)]
    words += ["--address", str(desk.place.address), "--set", f'launch.fleet="{child.name}"']
    words += ["--set", "training.num_rollouts=5"]
    assert await asyncio.to_thread(run_command, words) == DONE

    async def ended() -> bool:
        view = await look(parent.client, f"train/{child.name}")
        return view is not None and not view.is_open

    await until(ended)
    progress = await progress_of(parent.client, f"train/{child.name}")
    assert progress is not None
    assert (progress.state, progress.first_update, progress.next_update) == ("complete", 2, 5)
    assert "prepared 2 trainer,producer" in child.fleet.log
    assert not any(call.startswith(("optimize 0", "optimize 1")) for call in child.fleet.log)
    rows = child.store.read_jsonl(layout.UPDATES).rows
    assert [(row["update"], row["epoch"]) for row in rows] == [
        *((0, 1), (1, 1)),
        *((update, 2) for update in range(2, 5)),
    ]
    assert (await parent.progress()).next_update == 3
    gate.set()
    handle = parent.client.get_workflow_handle(f"train/{parent.name}")
    await asyncio.wait_for(handle.result(), 30)
