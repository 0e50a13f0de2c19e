"""What a free-running producer does at its ends: of an epoch, of a run, of an adoption."""

import asyncio
import threading
from contextlib import suppress

import pytest

from activities.storage.layout import ROLLOUT_ERRORS
from models.errors import DigestMismatch, ServingFailureSustained, StaleFence
from tests.support.async_run import AsyncRun, until


async def test_a_dead_epochs_worker_is_not_started_again_by_the_next_publication(rig):
    """The boundary is the first call of the new epoch and finds the old worker still ending."""
    run = AsyncRun(rig, rig.async_spec(core={"publication_mode": "barrier"}))
    await run.start()
    rig.engine.open.clear()
    collecting = asyncio.ensure_future(run.collect())
    await until(lambda: rig.engine.active == 8)
    run.epoch += 1
    await run.publish()
    await asyncio.sleep(0.05)
    assert rig.engine.active == 0  # nothing is sampled before it is asked for
    rig.engine.open.set()
    await run.updates(2)
    prompts = run.trained_prompts()
    assert len(set(prompts)) == len(prompts) == 4
    assert isinstance((await asyncio.gather(collecting, return_exceptions=True))[0], StaleFence)


async def test_an_adoption_that_fails_loses_no_finished_group(rig, monkeypatch):
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
    read = rig.store.read_bytes
    monkeypatch.setattr(rig.store, "read_bytes", lambda rel: read(rel)[:-1])
    with pytest.raises(DigestMismatch):
        await run.collect()
    monkeypatch.setattr(rig.store, "read_bytes", read)
    run.revoke()
    await run.start()
    await run.updates(4)
    trained = sorted(group for each in run.trained for group in run.groups(each))
    assert trained == [*range(8)]


async def test_the_last_collection_is_the_end_of_sampling(rig):
    run = AsyncRun(rig, rig.async_spec(training={"num_rollouts": 2}), held_out=2)
    await run.start()
    await run.updates(1)
    last = await run.collect()
    await until(lambda: rig.engine.active == 0)
    sampled = len(rig.engine.bodies)
    run.require_accounted(last)
    run.train(last)
    await run.publish()
    assert len(rig.engine.bodies) == sampled
    assert run.producer.snapshot()["producer_admission_open"] is False
    await run.evaluate()
    await asyncio.sleep(0.05)
    assert len(rig.engine.bodies) == sampled + 2  # the evaluation's own
    pending = (await run.producer.data_state(run.update - 1)).pending
    trained = {group for each in run.trained for group in run.groups(each)}
    drawn = (await run.producer.data_state(run.update - 1)).sample_group_index
    assert trained | {draw.group_index for draw in pending} == {*range(drawn)}


async def test_a_last_collection_that_is_not_trained_is_sampled_again(rig):
    run = AsyncRun(rig, rig.async_spec(training={"num_rollouts": 1}))
    await run.start()
    await run.collect()
    run.revoke()
    await run.start()
    again = await run.collect()
    run.require_accounted(again)
    assert again.epoch == run.epoch


async def test_failures_under_dead_engines_do_not_end_the_epoch_that_replaced_them(rig):
    now = 0.0
    run = AsyncRun(rig, clock=lambda: now)
    await run.start()
    rig.engine.script = rig.engine.failing(503, {"detail": "No healthy rollout workers available"})
    collecting = asyncio.ensure_future(run.collect())
    health = run.producer._parts.health
    await until(lambda: health.failures["unavailable"] == 4)
    for second in range(1, 200):
        now = float(second)
        health.record(faults=["unavailable"])
        health.check()
    run.revoke()
    await asyncio.wait({collecting})
    rig.engine.script = rig.engine.answer
    now = 301.0  # most of these failures are younger than five minutes
    with pytest.raises(ServingFailureSustained):
        health.check()
    await run.start()
    collection = await run.collect()
    assert collection.counts.groups == 2
    assert health.failures["unavailable"] >= 200  # totals are of the process


NO_ENGINE = (503, {"detail": "No healthy rollout workers available"})


async def paused_while_every_engine_dies(rig, seconds):
    """A run that trained an update and is paused; its attempts fail for so long. Its clock."""
    now = [0.0]
    run = AsyncRun(rig, clock=lambda: now[0])
    await run.start()
    rig.engine.next_scripts.extend([rig.engine.answer] * 4)  # one collection, the queue not full
    rig.engine.script = rig.engine.failing(*NO_ENGINE)
    run.train(await run.collect())
    await run.publish()
    health = run.producer._parts.health
    for second in range(1, seconds + 1):
        now[0] = float(second)
        health.record(faults=["unavailable"])
        with suppress(ServingFailureSustained):  # the worker finds it within half a second
            health.check()
    if seconds > 300:
        await until(lambda: any(row["fatal"] for row in rig.store.read_jsonl(ROLLOUT_ERRORS).rows))
    return run, health, now


@pytest.mark.parametrize("seconds", [290, 400])
async def test_engines_that_die_under_a_pause_and_are_replaced_end_no_run(rig, seconds):
    """Before the stop rule applies as well as after: the failures are of the former engines."""
    run, health, now = await paused_while_every_engine_dies(rig, seconds)
    rig.engine.script = rig.engine.answer
    await run.producer.set_engines(run.token(5), ("http://one",), healed=True)
    now[0] += 20.0  # the failures are younger than five minutes, and began longer ago than that
    await run.updates(2)
    run.require_accounted(run.trained[-1])
    assert health.failures["unavailable"] >= seconds


async def test_a_publication_replaces_no_engine_and_forgives_nothing(rig):
    run, _, _ = await paused_while_every_engine_dies(rig, 400)
    await run.producer.set_engines(run.token(5), ("http://one",))
    with pytest.raises(ServingFailureSustained):
        await run.collect()


async def test_a_heal_under_a_waiting_collection_forgives_nothing(rig):
    now = 0.0
    run = AsyncRun(rig, clock=lambda: now)
    await run.start()
    rig.engine.script = rig.engine.failing(*NO_ENGINE)
    collecting = asyncio.ensure_future(run.collect())
    health = run.producer._parts.health
    await until(lambda: health.failures["unavailable"] == 4)
    for second in range(1, 302):
        now = float(second)
        health.record(faults=["unavailable"])
        with suppress(ServingFailureSustained):
            health.check()
        if second % 50 == 0:  # an engine that dies again and again
            await run.producer.set_engines(run.token(5), ("http://one",), healed=True)
    with pytest.raises(ServingFailureSustained):
        await collecting


async def test_nothing_is_taken_once_the_worker_failed_although_it_still_writes_why(
    rig, monkeypatch
):
    run = AsyncRun(rig)
    await run.start()
    run.train(await run.collect())
    await run.publish()
    await until(lambda: run.producer.snapshot()["completed_queue_groups"] == 4)
    append, asked, storage_answers = rig.store.append_jsonl, threading.Event(), threading.Event()

    def slow(rel, row):
        asked.set()
        storage_answers.wait(10)
        append(rel, row)

    def check():
        raise ServingFailureSustained("half of the attempts failed")

    monkeypatch.setattr(rig.store, "append_jsonl", slow)
    monkeypatch.setattr(run.producer._parts.health, "check", check)
    await until(asked.is_set)
    asyncio.get_running_loop().call_later(0.1, storage_answers.set)
    with pytest.raises(ServingFailureSustained):
        await run.collect()
    assert rig.store.read_jsonl(ROLLOUT_ERRORS).rows[-1]["fatal"] is not None
