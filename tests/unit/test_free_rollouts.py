"""Fully async collections: whole batches in order of completion, and nothing lost on the way."""

import asyncio
import json

import pytest

from activities.rollout.collection_file import read_collection
from activities.storage.layout import ROLLOUT_FLOW
from models.errors import ContractViolation, StaleFence
from tests.support.async_run import AsyncRun, held, until


async def test_collections_follow_without_being_asked_ahead(rig):
    run = AsyncRun(rig)
    await run.start()
    assert rig.engine.bodies == []  # nothing is sampled before it is first asked for
    collection = await run.collect()
    await until(lambda: run.producer.snapshot()["completed_queue_groups"] == 4)
    run.train(collection)
    await run.publish()
    before = len(rig.engine.bodies)
    second = await run.collect()
    assert second.counts.groups == 2
    assert second.max_version == 0  # finished before version 1 was published
    assert len(rig.engine.bodies) - before <= 16
    run.train(second)
    await run.publish()
    await run.updates(4)
    prompts = run.trained_prompts()
    assert len(set(prompts)) == len(prompts) == 12
    for each in run.trained:
        run.require_accounted(each)


async def test_a_collection_reports_the_queue_the_errors_and_its_flow(rig):
    run = AsyncRun(rig)
    await run.start()
    collection = await run.collect()
    metrics = collection.metrics
    prefix = "rollout/fully_async/"
    assert metrics[f"{prefix}completed_queue/delivered_samples"] == 4
    assert metrics[f"{prefix}completed_queue/delivered_samples_by_age/0"] == 4
    assert metrics[f"{prefix}max_stale_requeues"] == 0
    assert metrics[f"{prefix}completed_queue/consumer_wait_seconds"] > 0
    assert metrics["errors/completed_group_attempts"] >= 2
    row = rig.store.read_jsonl(ROLLOUT_FLOW).rows[-1]
    assert (row["rollout_id"], row["samples"], row["mixed_responses"]) == (0, 4, 0)
    assert row["response_tokens"] == collection.counts.response_tokens
    assert (
        row["queue_metrics"][f"{prefix}completed_queue/delivered_response_tokens"]
        == (row["response_tokens"])
    )


async def test_groups_are_taken_in_order_of_completion(rig):
    late = asyncio.Event()

    async def script(request):
        body = json.loads(request.content)
        if len(rig.engine.bodies) <= 2:  # the first group
            await late.wait()
        return rig.engine.say(request, "y" if len(body["rid"]) % 2 else "n")

    rig.engine.script = script
    run = AsyncRun(rig)
    await run.start()
    assert run.groups(await run.collect()) == [1, 2]
    late.set()


async def test_a_failed_commit_returns_the_whole_batch_and_what_was_dropped(rig, monkeypatch):
    spec = rig.async_spec(core={"filter_zero_std_groups": True})
    run = AsyncRun(rig, spec, num_prompts=2000)
    await run.start()
    write = rig.store.write_json
    taken = []

    def full(rel, value):
        taken.append([each["draw"]["group_index"] for each in value["dropped"]])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rig.store, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        await run.collect()
    before = rig.store.read_jsonl(ROLLOUT_FLOW).rows[-1]["response_lengths"]
    assert held((await run.producer.data_state(5)).pending)[:1] == [0]  # all are owed again
    monkeypatch.setattr(rig.store, "write_json", write)
    collection = await run.collect()
    after = rig.store.read_jsonl(ROLLOUT_FLOW).rows[-1]["response_lengths"]
    assert after == before  # the same groups, not sampled again
    named = held([each.draw for each in run.manifest(collection).dropped])
    assert set(taken[0]) <= set(named)
    assert len(set(named)) == len(named)
    run.require_accounted(collection)


async def test_a_manifest_that_landed_although_its_write_failed_is_adopted(rig, monkeypatch):
    run = AsyncRun(rig)
    await run.start()
    write = rig.store.write_json

    def torn(rel, value):
        write(rel, value)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(rig.store, "write_json", torn)
    with pytest.raises(OSError, match="Input/output"):
        await run.collect()
    monkeypatch.setattr(rig.store, "write_json", write)
    await until(lambda: run.producer.snapshot()["completed_queue_groups"] >= 4)
    collection = await run.collect()
    run.require_accounted(collection)
    run.train(collection)
    await run.publish()
    await run.updates(3)
    prompts = run.trained_prompts()
    assert len(set(prompts)) == len(prompts) == 8
    run.require_accounted(run.trained[-1])


async def test_the_same_update_again_is_remembered_and_a_newer_attempt_joins(rig):
    run = AsyncRun(rig)
    await run.start()
    rig.engine.open.clear()
    first = asyncio.ensure_future(run.producer.collect(run.token(5), run.request()))
    await until(lambda: rig.engine.active == 8)
    first.cancel()  # its caller is gone; the stage goes on
    await asyncio.wait({first})
    second = asyncio.ensure_future(run.producer.collect(run.token(6), run.request()))
    rig.engine.open.set()
    collection = await second
    assert await run.producer.collect(run.token(7), run.request()) == collection


async def test_another_version_than_the_published_one_is_refused(rig):
    run = AsyncRun(rig)
    await run.start()
    run.version = 1
    with pytest.raises(ContractViolation, match="start at policy version 1, but 0 is published"):
        await run.collect()
    await run.producer.begin_publication(run.token(), 1)
    with pytest.raises(ContractViolation, match="but 1 is being published"):
        await run.collect()


async def test_a_revoked_epoch_gives_unfinished_prompts_back_and_keeps_finished_groups(rig):
    run = AsyncRun(rig)
    await run.start()
    served = 0

    async def script(request):
        nonlocal served
        served += 1
        if served > 2:  # one group finishes, all others hang
            await asyncio.Event().wait()
        return await rig.engine.answer(request)

    rig.engine.script = script
    collecting = asyncio.ensure_future(run.collect())
    await until(lambda: rig.engine.active == 8)
    await until(lambda: run.producer.snapshot()["producer_owned_groups"] == 4)
    owned = (await run.producer.data_state(-1)).pending
    run.revoke()
    with pytest.raises(StaleFence):
        await collecting
    await until(lambda: rig.engine.active == 0)
    await until(lambda: run.producer.snapshot()["producer_owned_groups"] == 0)
    snapshot = run.producer.snapshot()
    assert snapshot["completed_queue"]["groups"] == 1  # the batch of one returned to the queue
    assert (await run.producer.data_state(-1)).pending == owned
    sampled = len(rig.engine.bodies)
    rig.engine.script = rig.engine.answer
    await run.start()
    assert len(rig.engine.bodies) == sampled  # nothing before the next collection
    collection = await run.collect()
    assert 0 in run.groups(collection)
    for draw in (await run.producer.data_state(-1)).pending:
        assert draw.requeues == draw.stale == 0  # a revoke is nobody's fault
    run.require_accounted(collection)


async def test_a_collection_of_a_dead_epoch_is_taken_apart(rig):
    run = AsyncRun(rig)
    await run.start()
    await run.updates(1)
    lost = await run.collect()  # committed, and never trained
    run.revoke()
    await run.start()
    again = await run.collect()
    run.require_accounted(again)
    run.train(again)
    await run.publish()
    await run.updates(4)
    prompts = run.trained_prompts()
    assert len(set(prompts)) == len(prompts) == 12
    trained = {group for each in run.trained for group in run.groups(each)}
    owed = held((await run.producer.data_state(run.update - 1)).pending)
    assert set(run.groups(lost)) <= trained | set(owed)


async def test_an_heir_goes_on_after_the_last_trained_collection(rig):
    run = AsyncRun(rig, num_prompts=8)
    await run.start()
    await run.updates(3)
    await run.collect()  # committed under an epoch that ends here
    await run.rebuild()
    await run.start()
    await run.updates(5)
    prompts = run.trained_prompts()
    assert len(set(prompts)) == len(prompts) == 16
    run.require_accounted(run.trained[-1])


async def test_a_zombie_of_the_old_epoch_is_refused(rig):
    run = AsyncRun(rig)
    await run.start()
    await run.updates(1)
    old, request = run.token(9), run.request()
    run.revoke()
    await run.start()
    for call in (
        run.producer.collect(old, request),
        run.producer.begin_publication(old, 7),
        run.producer.end_publication(old, 1),
        run.producer.set_engines(old, ()),
    ):
        with pytest.raises(StaleFence):
            await call
    assert len(read_collection(rig.store, await run.collect())) == 2


async def test_publications_are_of_fully_async_producers_only(rig):
    producer = rig.producer()
    with pytest.raises(ContractViolation, match="sequential"):
        await producer.begin_publication(AsyncRun.token(AsyncRun(rig)), 0)
    with pytest.raises(ContractViolation, match="sequential"):
        producer.snapshot()
