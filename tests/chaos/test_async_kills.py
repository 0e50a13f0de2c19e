"""A fully async run with two engines, killed at random moments: no prompt lost, none doubled.

``poe chaos`` runs the whole test; the bounded part, one kill of each component that only such a
run has or treats in its own way, runs with the other tests.
"""

import asyncio
import os
import random
from pathlib import Path

import pytest
from kill_harness import Job, Stack, account, write_config
from temporalio.client import WorkflowExecutionStatus

MODES = ("refresh", "rolling", "barrier")
VICTIMS = ("engine", "router", "producer", "trainer", "gpu", "control", "temporal")
NUM_KILLS = 10


def _job(stack: Stack, tiny_model: Path, tmp_path: Path, mode: str, num_updates: int) -> Job:
    name = f"async-{mode}-{num_updates}"
    config = write_config(
        tmp_path / "run.toml",
        name,
        tmp_path / "root",
        tiny_model,
        async__fully_async=True,
        core__publication_mode=mode,
        core__max_policy_lag=4,
        inference__num_engines=2,
        inference__deterministic=False,
        training__global_batch_size=128,
        training__num_rollouts=num_updates,
        optimizer__learning_rate=2e-4,
    )
    return Job(stack, config, name, tmp_path / "root")


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", MODES)
async def test_ten_random_kills(stack: Stack, tiny_model: Path, tmp_path: Path, mode: str) -> None:
    num_updates = 64
    job = _job(stack, tiny_model, tmp_path, mode, num_updates)
    seed = int(os.environ.get("PERDURE_CHAOS_SEED", random.randrange(10**6)))
    dice = random.Random(f"{seed}:{mode}")
    victims = [*VICTIMS, *dice.choices(VICTIMS, k=NUM_KILLS - len(VICTIMS))]
    dice.shuffle(victims)
    points = sorted(dice.sample(range(2, num_updates - 4), NUM_KILLS))
    print(f"seed {seed}: {list(zip(points, victims, strict=True))}")
    await asyncio.to_thread(job.start)
    for point, victim in zip(points, victims, strict=True):
        await job.until_updates(point + job.updates_redone())
        # Somewhere within an update, which takes about half a second.
        await asyncio.sleep(dice.uniform(0, 0.5))
        print(await job.kill_and_measure(victim, "any"))
    assert await job.until_closed() == WorkflowExecutionStatus.COMPLETED
    books = account(tmp_path / "root")
    print(books.verdict, "updates redone:", job.updates_redone())
    assert (books.missing, books.doubled) == (0, 0)
    assert books.updates == list(range(num_updates))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.workflow
@pytest.mark.timeout(600)
async def test_router_producer_and_engine_die_in_one_run(
    stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    num_updates = 16
    job = _job(stack, tiny_model, tmp_path, "refresh", num_updates)
    await asyncio.to_thread(job.start)
    for number, victim in enumerate(("router", "producer", "engine")):
        await job.until_updates(2 + 4 * number)
        print(await job.kill_and_measure(victim, "any"))
    assert await job.until_closed() == WorkflowExecutionStatus.COMPLETED
    books = account(tmp_path / "root")
    assert (books.missing, books.doubled) == (0, 0)
    assert books.updates == list(range(num_updates))
