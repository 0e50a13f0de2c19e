"""SIGKILL of every process at every kind of moment: the run completes, no prompt lost or doubled.

The whole matrix takes about ten minutes (``poe chaos``); the bounded part that runs with the other
tests is ``test_one_run_many_kills.py``.
"""

import asyncio
import random
from pathlib import Path

import pytest
from kill_harness import VICTIMS, Job, Stack, account, write_config
from temporalio.client import WorkflowExecutionStatus

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.mark.parametrize("moment", ["update", "checkpoint", "evaluation"])
@pytest.mark.parametrize("victim", VICTIMS)
async def test_kill(
    stack: Stack, tiny_model: Path, tmp_path: Path, victim: str, moment: str
) -> None:
    name = f"kill-{victim}-{moment}"
    config = write_config(tmp_path / "run.toml", name, tmp_path / "root", tiny_model)
    job = Job(stack, config, name, tmp_path / "root")
    await asyncio.to_thread(job.start)
    await job.until_updates(8)
    recovery = await job.kill_and_measure(victim, moment)
    assert await job.until_closed() == WorkflowExecutionStatus.COMPLETED
    books = account(tmp_path / "root")
    print(recovery, "updates redone:", job.updates_redone())
    assert (books.missing, books.doubled) == (0, 0)
    assert books.updates == list(range(24))


async def test_several_random_kills_end_in_the_same_parameters(
    stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    """Sequential mode: same SHA-256 of the parameters, same order of trained samples."""
    ends = []
    for name, victims in (("calm", ()), ("hit", ("trainer", "engine", "gpu"))):
        root = tmp_path / name
        config = write_config(
            tmp_path / f"{name}.toml", name, root, tiny_model, evaluation__interval=1000
        )
        job = Job(stack, config, name, root)
        await asyncio.to_thread(job.start)
        points = sorted(random.sample(range(2, 20), len(victims)))
        print(dict(zip(points, victims, strict=True)))
        for point, victim in zip(points, victims, strict=True):
            await job.until_updates(point)
            await job.kill_and_measure(victim, "update")
        assert await job.until_closed() == WorkflowExecutionStatus.COMPLETED
        books = account(root)
        ends.append((_parameters_sha256(root), books.trained))
    assert ends[0][1] == ends[1][1]
    assert ends[0][0] == ends[1][0]


def _parameters_sha256(root: Path) -> str:
    from activities.storage.commit import newest_checkpoint, read_marker
    from activities.storage.store import Store

    store = Store(str(root))
    checkpoint = newest_checkpoint(store)
    assert checkpoint is not None
    marker = read_marker(store, checkpoint)
    return next(file.sha256 for file in marker.files if file.path.endswith("model.safetensors"))
