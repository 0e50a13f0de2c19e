"""Evaluation beside training: N in = N out, one version, own parameters, training unchanged."""

import asyncio

import httpx
import pytest

from activities.rollout.collection_file import read_collection, read_samples
from models.errors import ConfigurationError, ContractViolation
from models.evaluation import EvaluateRequest
from models.ids import FenceToken
from models.rollout import CollectRequest

ONE = ("http://one",)
TOKEN = FenceToken(epoch=1, update=0, attempt=1)


def evaluation(rig, update=0, version=0, phase="initial"):
    return EvaluateRequest(run=rig.run, epoch=1, update=update, policy_version=version, phase=phase)


async def evaluate(rig, producer, **options):
    async with asyncio.timeout(20):
        return await producer.evaluate(TOKEN, evaluation(rig, **options))


async def test_every_row_and_sample_comes_back(rig):
    spec = rig.spec(
        evaluation={"samples_per_prompt": 2, "temperature": 0.0, "max_response_length": 5}
    )
    producer = rig.producer(spec, held_out=7)
    await producer.set_engines(TOKEN, ONE)
    report = await evaluate(rig, producer)
    assert (report.prompts, report.samples, report.name) == (7, 14, "heldout")
    assert report.sha256 == rig.store.sha256(report.uri)
    groups = read_samples(rig.store, report.uri)
    assert [group.prepared_sample_id for group in groups] == [
        f"task:eval:{row}" for row in range(7)
    ]
    rewards = [reward for group in groups for reward in group.rewards]
    assert report.reward_mean == pytest.approx(sum(rewards) / 14)
    assert report.error_fraction == report.truncated_fraction == 0.0
    assert report.metrics["eval/heldout"] == report.reward_mean
    assert report.metrics["eval/heldout-truncated_ratio"] == 0.0
    assert report.metrics["eval/heldout-none_reward_ratio"] == 0.0
    assert report.metrics["eval/step"] == 0
    params = rig.engine.bodies[0]["sampling_params"]
    assert (params["temperature"], params["max_new_tokens"]) == (0.0, 5)
    assert (params["top_p"], params["top_k"]) == (1.0, -1)


async def test_more_rows_than_permits(rig):
    producer = rig.producer(rig.spec(inference={"server_concurrency": 2}), held_out=40)
    await producer.set_engines(TOKEN, ONE)
    assert (await evaluate(rig, producer)).prompts == 40
    assert rig.engine.max_active <= 2


async def test_a_failed_row_is_sampled_again_alone(rig):
    producer = rig.producer(held_out=5)
    await producer.set_engines(TOKEN, ONE)
    rig.engine.next_scripts.append(rig.engine.dropping())
    report = await evaluate(rig, producer)
    assert (report.prompts, report.samples) == (5, 5)
    assert len(rig.engine.bodies) == 6


async def test_the_same_evaluation_is_not_run_twice(rig):
    producer = rig.producer()
    await producer.set_engines(TOKEN, ONE)
    first = await evaluate(rig, producer)
    assert await evaluate(rig, producer) == first
    assert len(rig.engine.bodies) == 3
    await evaluate(rig, producer, phase="final")
    assert len(rig.engine.bodies) == 6


async def test_another_version_is_refused(rig):
    producer = rig.producer()
    await producer.set_engines(TOKEN, ONE)
    with pytest.raises(ContractViolation, match="weight_version"):
        await evaluate(rig, producer, version=4)


async def test_a_failing_evaluation_can_be_repeated(rig):
    producer = rig.producer()
    await producer.set_engines(TOKEN, ONE)
    rig.engine.next_scripts.append(rig.engine.failing(500, {}))
    with pytest.raises(ContractViolation, match="status 500"):
        await evaluate(rig, producer)
    assert (await evaluate(rig, producer)).samples == 3


async def test_no_held_out_prompts(rig):
    producer = rig.producer(held_out=0)
    await producer.set_engines(TOKEN, ONE)
    with pytest.raises(ConfigurationError, match="held-out"):
        await evaluate(rig, producer)


async def test_evaluation_during_a_collection_changes_no_training_sample(rig):
    alone = rig.producer()
    await alone.set_engines(TOKEN, ONE)
    request = CollectRequest(run=rig.run, epoch=1, update=0, policy_version=0, consumed_through=-1)
    expected = await alone.collect(TOKEN, request)
    rig.store.remove_tree("rollouts")

    producer = rig.producer(rig.spec(inference={"server_concurrency": 4}))
    await producer.set_engines(TOKEN, ONE)
    order = []

    async def noted(http_request: httpx.Request) -> httpx.Response:
        order.append("eval" if b"101,118,97,108" in http_request.content else "train")
        return await rig.engine.answer(http_request)

    rig.engine.script = noted
    rig.engine.open.clear()
    collecting = asyncio.ensure_future(producer.collect(TOKEN, request))
    while rig.engine.active < 4:
        await asyncio.sleep(0)
    evaluating = asyncio.ensure_future(evaluate(rig, producer))
    while (await producer.progress()).stage != "evaluate 0":
        await asyncio.sleep(0)
    rig.engine.open.set()
    report = await evaluating
    collection = await asyncio.wait_for(collecting, 10)
    assert report.samples == 3
    assert collection.sha256 == expected.sha256
    assert len(read_collection(rig.store, collection)) == 4
    # admitted calls finished, then evaluation ran alone, then training went on
    assert order == ["train"] * 4 + ["eval"] * 3 + ["train"] * 12
