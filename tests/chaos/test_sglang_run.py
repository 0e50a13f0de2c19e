"""A whole run on a real SGLang server: sampled, trained, published to, killed and replaced."""

import asyncio
from pathlib import Path

import pytest
from kill_harness import Job, Stack, account, write_config
from temporalio.client import WorkflowExecutionStatus

from activities.storage import layout
from activities.storage.store import Store
from tests.support.sglang_server import NO_SGLANG, ON_CPU, ON_GPU, sees_gpu, sglang_python

pytestmark = [pytest.mark.chaos, pytest.mark.sglang, pytest.mark.timeout(900)]

UPDATES = 8
START_S = 400


async def test_a_run_on_sglang_survives_the_death_of_its_server(
    stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    python = sglang_python()
    if python is None:
        pytest.skip(NO_SGLANG)
    on_gpu = sees_gpu(python)
    arguments = {
        f"inference__sglang.{key}": value for key, value in (ON_GPU if on_gpu else ON_CPU).items()
    }
    root = tmp_path / "root"
    config = write_config(
        tmp_path / "run.toml", "on-sglang", root, tiny_model, **arguments,
        placement__mode="colocated" if on_gpu else "cpu", core__publication_transport="ipc",
        training__num_rollouts=UPDATES, training__save_interval=3, inference__engine="sglang",
        inference__dtype="bfloat16" if on_gpu else "float32", inference__deterministic=on_gpu,
        inference__start_timeout_s=300.0,
    )  # fmt: skip
    job = Job(stack, config, "on-sglang", root)
    await asyncio.to_thread(job.start)
    await job.until_updates(3, START_S)
    job.kill("engine")
    assert await job.until_closed(START_S) == WorkflowExecutionStatus.COMPLETED
    books = account(root)
    assert (books.missing, books.doubled) == (0, 0)
    assert books.updates == list(range(UPDATES))
    rows = Store(str(root)).read_jsonl(layout.PUBLICATION).rows
    by_handle = [row for row in rows if row["transport"] == "ipc" and row["buckets"]]
    assert len(by_handle) >= UPDATES - 1
    for row in by_handle:
        assert [engine["digest"] for engine in row["engines"]] == [row["digest"]]
