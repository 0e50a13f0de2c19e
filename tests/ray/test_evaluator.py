"""An evaluator on a real cluster: the same samples as the run's own engines, and no orphans."""

import asyncio
import contextlib
from functools import partial

import psutil
import pytest
from fleet_rig import NoTracker, Run, kill, publish, until, update
from temporalio.testing import ActivityEnvironment

from activities.background.receipts import evaluation_key, evaluation_tasks
from activities.background.snapshot import snapshot
from activities.rollout.collection_file import read_samples
from activities.site import Site
from activities.storage import layout
from activities.wire.client import EngineClient
from activities.wire.router_client import RouterClient
from configs.plan import loop_plan
from models.background import BackgroundOrder, SnapshotRef, SnapshotRequest
from models.errors import DigestMismatch, EngineLost
from models.evaluation import EvaluateRequest
from models.ports import OpenEvaluator
from workers.fleet import RayFleet
from workers.fleet.cluster import RayCluster
from workers.fleet.evaluating import RayEvaluators
from workers.fleet.folders import scratch_folder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def evaluators(fleet: RayFleet, ray_address: str) -> OpenEvaluator:
    return RayEvaluators(RayCluster(ray_address)).open


def order_of(run: Run, reference: SnapshotRef) -> BackgroundOrder:
    receipt = layout.eval_receipt(reference.update, evaluation_key(evaluation_tasks(run.spec)))
    return BackgroundOrder(
        run=run.ref,
        receipt=receipt,
        experiment_id=f"{run.ref.run_id}/evaluation/{reference.update}",
        phase="periodic",
        snapshot=reference,
        timeout_s=120.0,
        plan=loop_plan(run.spec),
    )


async def take_snapshot(fleet: RayFleet, run: Run, finished: int) -> SnapshotRef:
    site = Site(fleet=fleet, tracker=NoTracker(), engine=EngineClient, router=RouterClient)
    request = SnapshotRequest(
        run=run.ref, epoch=run.epoch, update=finished, policy_version=finished
    )
    reference: SnapshotRef = await ActivityEnvironment().run(
        snapshot, site, request, run.token(finished, 1)
    )
    return reference


async def test_a_snapshot_gives_the_samples_of_the_run_itself(
    fleet: RayFleet, make_run, evaluators: OpenEvaluator
):
    run: Run = make_run(evaluation={"mode": "background", "interval": 1, "samples_per_prompt": 2})
    await fleet.prepare(run.token(), run.request())
    await publish(fleet, run, run.token(), 0)
    initial = await take_snapshot(fleet, run, 0)
    await update(fleet, run, 0)
    await publish(fleet, run, run.token(1), 1)
    request = EvaluateRequest(
        run=run.ref, epoch=run.epoch, update=1, policy_version=1, phase="periodic"
    )
    shared = await fleet.producer(run.ref).evaluate(run.token(1, 1), request)
    reference = await take_snapshot(fleet, run, 1)
    await fleet.teardown(run.ref)

    async with evaluators(order_of(run, reference)) as evaluator:
        report = await evaluator.evaluate()
        progress = await evaluator.progress()
    assert (report.update, report.policy_version, report.name) == (1, 1, "heldout")
    assert (report.prompts, report.samples) == (4, 8)
    assert report.reward_mean == shared.reward_mean
    assert (progress.done, progress.total) == (8, 8)
    ours, theirs = read_samples(run.store, report.uri), read_samples(run.store, shared.uri)
    assert [each.text for group in ours for each in group.samples] == [
        each.text for group in theirs for each in group.samples
    ]
    # The prepared model, cast by the engine, is what the trainer exported for version 0.
    async with evaluators(order_of(run, initial)) as evaluator:
        assert (await evaluator.evaluate()).policy_version == 0
    assert not scratch_folder(f"{run.ref.root}/{order_of(run, initial).receipt}").exists()


async def test_what_dies_ends_the_evaluation_and_leaves_nothing(
    fleet: RayFleet, make_run, evaluators: OpenEvaluator
):
    run: Run = make_run(
        evaluation={"mode": "background", "samples_per_prompt": 2000},
        inference={"max_running_requests": 4, "server_concurrency": 4},
    )
    await fleet.prepare(run.token(), run.request())
    await publish(fleet, run, run.token(), 0)
    initial = await take_snapshot(fleet, run, 0)
    await fleet.teardown(run.ref)
    order = order_of(run, initial)
    wrong = order.model_copy(update={"snapshot": initial.model_copy(update={"digest": "0" * 64})})
    async with evaluators(wrong) as evaluator:
        with pytest.raises(DigestMismatch, match="0000"):
            await evaluator.evaluate()

    for victim in ("engine", "actor"):
        async with evaluators(order) as evaluator:
            evaluating = asyncio.ensure_future(evaluator.evaluate())
            engine, actor = await sampling(evaluator, evaluating)
            kill(engine if victim == "engine" else actor)
            with pytest.raises(EngineLost):
                await asyncio.wait_for(evaluating, 20)
        await until(partial(gone, engine))

    async with evaluators(order) as evaluator:
        evaluating = asyncio.ensure_future(evaluator.evaluate())
        engine, _ = await sampling(evaluator, evaluating)
        evaluating.cancel()
        await asyncio.gather(evaluating, return_exceptions=True)
    await until(partial(gone, engine))


async def gone(pid: int) -> bool:
    """Whether a process runs no more; whoever adopts it may take a moment to reap it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


async def sampling(evaluator, evaluating) -> tuple[int, int]:
    """Pids of the engine and of the actor, once samples come back."""
    async with asyncio.timeout(60):
        while (await evaluator.progress()).done == 0:
            assert not evaluating.done(), evaluating.exception()
            await asyncio.sleep(0.05)
    facts = await evaluator._actor.call("facts")
    return facts.status.pid, facts.actor_pid
