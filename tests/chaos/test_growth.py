"""A long run stays small: memory is flat and no history grows beyond a few thousand events.

``PERDURE_GROWTH_UPDATES`` sets the length; the default is the bounded part, ``poe growth`` runs
1,500 updates.
"""

import asyncio
import os
from pathlib import Path

import pytest
from kill_harness import ACTORS, Job, Stack, account, resident_bytes, write_config
from temporalio.client import WorkflowExecutionStatus

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.workflow, pytest.mark.timeout(1800)]

UPDATES = int(os.environ.get("PERDURE_GROWTH_UPDATES", "200"))
EARLY = 50
"""Caches have filled by this update."""
LATE = UPDATES - 10
GROWTH = 1.05
MOST_EVENTS = 2_000
"""Of one history; the server suggests a new one at about 4,000."""


async def test_memory_and_histories_stay_small(
    stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    config = write_config(
        tmp_path / "run.toml",
        "growth",
        root,
        tiny_model,
        training__num_rollouts=UPDATES,
        training__rollout_batch_size=4,
        training__global_batch_size=32,
        training__save_interval=50,
        core__max_policy_lag=0,
        evaluation__interval=100_000,
        inference__deterministic=False,
    )
    job = Job(stack, config, "growth", root)
    await asyncio.to_thread(job.start)
    await job.until_updates(EARLY)
    early = _memory(job, stack)
    await job.until_updates(LATE, timeout_s=1500)
    late = _memory(job, stack)
    assert await job.until_closed() == WorkflowExecutionStatus.COMPLETED
    print({name: (early[name] >> 20, late[name] >> 20) for name in early})
    grown = {name: late[name] / early[name] for name in early if late[name] > GROWTH * early[name]}
    assert not grown, f"resident memory grew between updates {EARLY} and {LATE}: {grown}"
    lengths = await _history_lengths(stack, job.run_id)
    assert len(lengths) > UPDATES // 50
    assert max(lengths) < MOST_EVENTS
    books = account(root)
    assert (books.missing, books.doubled) == (0, 0)


def _memory(job: Job, stack: Stack) -> dict[str, int]:
    pids = {role: pid for role in ACTORS for pid in job.actor_pids(role)}
    pids |= {name: stack.pids()[name] for name in ("control", "gpu")}
    return {name: resident_bytes(pid) for name, pid in pids.items()}


async def _history_lengths(stack: Stack, run_id: str) -> list[int]:
    client = await stack.client()
    return [
        execution.history_length
        async for execution in client.list_workflows(f'WorkflowId="{run_id}"')
    ]
