"""Evaluation on the engines of a free-running producer: training makes way and goes on after."""

import asyncio
import json

import pytest

from activities.storage.layout import PIPELINE_LIFECYCLE
from models.errors import ContractViolation, ServiceUnreachable
from tests.support.async_run import AsyncRun, until

PROMPT_LETTERS = {False: [ord(each) for each in "train"], True: [ord(each) for each in "eval"]}


def is_eval(body):
    return body["input_ids"][:4] == PROMPT_LETTERS[True]


class Held:
    """Training calls wait for ``open``; evaluation calls are answered, or fail as told."""

    def __init__(self, engine):
        self.engine = engine
        self.open = asyncio.Event()
        self.order = []
        self.eval_status = 200
        self.eval_open = asyncio.Event()
        self.eval_open.set()
        engine.script = self.script

    async def script(self, request):
        evaluates = is_eval(json.loads(request.content))
        self.order.append("eval" if evaluates else "train")
        await (self.eval_open if evaluates else self.open).wait()
        if evaluates and self.eval_status != 200:
            return await self.engine.failing(self.eval_status, {})(request)
        return await self.engine.answer(request)


def paused_spec(rig, **inference):
    """Four permits for the eight samples in the making, so that four calls are parked."""
    return rig.async_spec(inference={"server_concurrency": 4, **inference})


async def begun(rig, spec=None, **options):
    run = AsyncRun(rig, spec or paused_spec(rig), held_out=5, **options)
    engine = Held(rig.engine)
    await run.start()
    collecting = asyncio.ensure_future(run.collect())
    await until(lambda: rig.engine.active == 4)
    await until(lambda: run.producer.snapshot()["http_waiting_requests"] == 4)
    return run, engine, collecting


async def test_parked_samples_stay_and_only_active_calls_must_end(rig):
    run, engine, collecting = await begun(rig)
    evaluating = asyncio.ensure_future(run.evaluate())
    await until(lambda: run.producer.snapshot()["generation_admission_paused"])
    snapshot = run.producer.snapshot()
    assert snapshot["generation_admission_waiters"] == 4
    assert snapshot["generation_active_calls"] == 4
    assert not snapshot["producer_admission_open"]
    assert snapshot["completed_queue_capacity_groups"] == 4 + 4  # the four groups in the making
    await asyncio.sleep(0.05)
    assert engine.order == ["train"] * 4
    engine.open.set()
    report = await evaluating
    assert report.samples == 5
    # The admitted calls finished, the evaluation ran alone, the parked ones went on.
    await collecting
    assert engine.order[:9] == ["train"] * 4 + ["eval"] * 5
    assert set(engine.order[9:]) == {"train"}
    snapshot = run.producer.snapshot()
    assert not snapshot["generation_admission_paused"]
    assert snapshot["producer_admission_open"]
    assert snapshot["completed_queue_capacity_groups"] == 4
    events = [row["event"] for row in await lifecycle(run)]
    assert events == ["generation_paused", "generation_resumed"]


async def lifecycle(run):
    """Rows that are written behind the producer's back."""
    await run.producer._free._observer.writer.aclose()
    return run.rig.store.read_jsonl(PIPELINE_LIFECYCLE).rows


async def test_the_rows_of_the_lifecycle_show_the_pause(rig):
    run, engine, collecting = await begun(rig)
    engine.open.set()
    await run.evaluate()
    await collecting
    paused, resumed = await lifecycle(run)
    assert paused["generation_admission_paused"] is True
    assert (paused["generation_active_calls"], paused["http_active_requests"]) == (0, 0)
    assert paused["http_waiting_requests"] == 0
    assert resumed["generation_admission_paused"] is False


async def test_finished_groups_do_not_block_and_the_worker_resumes_as_the_queue_drains(rig):
    """The queue holds two and is full; the four groups in the making all go in meanwhile."""
    setting = {"async_data_buffer_capacity_factor": 1.0}
    run = AsyncRun(rig, rig.async_spec(**{"async": setting}), held_out=5)
    engine = Held(rig.engine)
    await run.start()
    served = 0

    async def first_four_groups(request):
        nonlocal served
        served += 1
        return await (rig.engine.answer if served <= 8 else engine.script)(request)

    rig.engine.script = first_four_groups
    run.train(await run.collect())
    await until(lambda: run.producer.snapshot()["completed_queue_groups"] == 2)
    await run.publish()
    await until(lambda: rig.engine.active == 8)
    engine.eval_open.clear()
    evaluating = asyncio.ensure_future(run.evaluate())
    await until(lambda: run.producer.snapshot()["generation_admission_paused"])
    engine.open.set()
    await until(lambda: run.producer.snapshot()["completed_queue_groups"] == 6)
    assert run.producer.snapshot()["producer_ready"]["groups"] == 0
    engine.eval_open.set()
    await evaluating
    assert run.producer.snapshot()["completed_queue_capacity_groups"] == 2
    calls = engine.order.count("train")
    for left in (4, 2):
        await asyncio.sleep(0.6)
        assert engine.order.count("train") == calls  # above its capacity: nothing begins
        run.train(await run.collect())
        assert run.producer.snapshot()["completed_queue_groups"] >= left
        await run.publish()
    await until(lambda: engine.order.count("train") > calls)


async def test_a_failed_evaluation_leaves_training_paused_and_a_retry_opens_it(rig):
    run, engine, collecting = await begun(rig)
    engine.eval_status = 500
    engine.open.set()
    with pytest.raises(ContractViolation, match="status 500"):
        await run.evaluate()
    gate = run.producer._evaluation.gate
    assert (gate.active, gate.waiting) == (0, 0)
    with pytest.raises(RuntimeError, match="aborted"):
        gate.resume()
    calls = engine.order.count("train")
    await asyncio.sleep(0.7)
    assert engine.order.count("train") == calls  # still closed
    assert run.producer.snapshot()["generation_admission_waiters"] == 4
    engine.eval_status = 200
    assert (await run.evaluate(attempt=5)).samples == 5
    collection = await collecting
    assert collection.metrics["rollout/max_requeues"] == 0
    run.require_accounted(collection)


async def test_the_next_collection_opens_what_a_failed_evaluation_left_closed(rig):
    run, engine, collecting = await begun(rig)
    engine.open.set()
    run.train(await collecting)
    engine.eval_status = 500
    with pytest.raises(ContractViolation):
        await run.evaluate()
    assert run.producer.snapshot()["generation_admission_paused"]
    engine.eval_status = 200
    await run.publish()
    await run.updates(3)
    snapshot = run.producer.snapshot()
    assert not snapshot["generation_admission_paused"]
    assert snapshot["completed_queue_capacity_groups"] == 4
    prompts = run.trained_prompts()
    assert len(set(prompts)) == len(prompts) == 8


async def test_calls_that_do_not_drain_fail_the_evaluation(rig):
    run, engine, collecting = await begun(rig, paused_spec(rig, drain_timeout_s=0.05))
    with pytest.raises(ServiceUnreachable, match="4 generation calls still run"):
        await run.evaluate()
    assert engine.order == ["train"] * 4
    engine.open.set()
    assert (await run.evaluate(attempt=5)).samples == 5
    await collecting


async def test_scoring_goes_on_while_generation_is_paused(rig):
    run, engine, collecting = await begun(rig)
    engine.eval_open.clear()
    evaluating = asyncio.ensure_future(run.evaluate())
    await until(lambda: run.producer.snapshot()["generation_admission_paused"])
    engine.open.set()
    await until(lambda: "eval" in engine.order)
    # Two groups had both their calls admitted: they are scored and taken while training is paused.
    collection = await collecting
    assert run.producer.snapshot()["generation_admission_paused"]
    assert run.groups(collection) == [0, 1]
    engine.eval_open.set()
    await evaluating


async def test_evaluation_counts_as_one_version_and_leaves_training_samples_alone(rig):
    run, engine, collecting = await begun(rig)
    engine.open.set()
    report = await run.evaluate()
    run.train(await collecting)
    await run.publish()
    assert (report.policy_version, report.prompts) == (0, 5)
    await run.updates(2)
    second = await run.evaluate()
    assert (second.policy_version, second.samples) == (3, 5)
    prompts = run.trained_prompts()
    assert len(set(prompts)) == len(prompts) == 6
