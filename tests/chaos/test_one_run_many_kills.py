"""The bounded part of the kill matrix: every component of one run is killed once.

The whole matrix, one run a kill, is ``poe chaos``.
"""

import asyncio
from pathlib import Path

import pytest
from kill_harness import Job, Stack, account, write_config
from temporalio.client import WorkflowExecutionStatus

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.workflow, pytest.mark.timeout(600)]

VICTIMS = ("engine", "gpu", "producer", "temporal", "trainer", "control")


async def test_no_prompt_is_lost_or_doubled(stack: Stack, tiny_model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.toml", "many-kills", tmp_path / "root", tiny_model)
    job = Job(stack, config, "many-kills", tmp_path / "root")
    await asyncio.to_thread(job.start)
    for number, victim in enumerate(VICTIMS):
        await job.until_updates(3 + 3 * number)
        print(await job.kill_and_measure(victim, "update"))
    assert await job.until_closed() == WorkflowExecutionStatus.COMPLETED
    books = account(tmp_path / "root")
    assert (books.missing, books.doubled) == (0, 0)
    assert books.updates == list(range(24))
