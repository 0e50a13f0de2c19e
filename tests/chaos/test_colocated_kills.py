"""Engines and trainer take turns with memory, and are killed in the middle of it."""

import asyncio
from pathlib import Path

import pytest
from kill_harness import Job, Stack, account, write_config
from temporalio.client import WorkflowExecutionStatus

from activities.storage import layout
from activities.storage.store import Store
from activities.turns import STAGE

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.workflow, pytest.mark.timeout(600)]

KILLS = (
    ("engine", "training"),
    ("trainer", "training"),
    ("gpu", "training"),
    ("engine", "publication"),
    ("trainer", "publication"),
)
UPDATES = 18


async def test_a_run_that_takes_turns_survives_kills_in_every_turn(
    stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    config = write_config(
        tmp_path / "run.toml", "turns", root, tiny_model,
        placement__mode="colocated", training__num_rollouts=UPDATES, training__save_interval=3,
        inference__num_engines=2,
        # Weights go from process to process, in more than one piece, as on GPUs.
        core__publication_transport="ipc", core__update_weight_buffer_mib=1,
    )  # fmt: skip
    job = Job(stack, config, "turns", root)
    await asyncio.to_thread(job.start)
    for number, (victim, moment) in enumerate(KILLS):
        await job.until_updates(2 + 3 * number)
        print(await job.kill_and_measure(victim, moment))
    assert await job.until_closed() == WorkflowExecutionStatus.COMPLETED
    books = account(root)
    assert (books.missing, books.doubled) == (0, 0)
    assert books.updates == list(range(UPDATES))

    store = Store(str(root))
    releases = [row for row in store.read_jsonl(layout.DRIVER_TIMING).rows if row["stage"] == STAGE]
    assert {row["rollout_id"] for row in releases if row["passed"]} == set(range(UPDATES))
    rows = store.read_jsonl(layout.PUBLICATION).rows
    assert {row["version"] for row in rows} >= {2 * update for update in range(UPDATES + 1)}
    # One that dies just when a publication begins is loaded by the healing of the next stage.
    short = [row for row in rows if len(row["engines"]) != 2]
    assert len(short) <= sum(victim == "engine" for victim, _ in KILLS)
    assert sum(row["transport"] == "ipc" and row["buckets"] > 1 for row in rows) > UPDATES - len(
        KILLS
    )
    # What a kill made come again found engines that had their memory.
    woken = [row for row in rows if row["memory_seconds"] > 0]
    assert len(woken) >= UPDATES - len(KILLS)
