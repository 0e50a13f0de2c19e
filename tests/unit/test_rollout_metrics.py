"""Metrics of whole collections, computed again from the committed files: each sample once."""

import json
import statistics
import time
from collections import Counter

import httpx
import pytest

from activities.rollout.attempt import sampling_seed
from activities.rollout.collection_file import read_collection
from activities.storage.layout import collection_manifest
from models.ids import FenceToken
from models.metrics import refuse_undeclared
from models.rollout import CollectionManifest, CollectRequest
from tests.support.async_run import AsyncRun, until

TOKEN = FenceToken(epoch=1, update=0, attempt=1)


def seed_of(request):
    return json.loads(request.content)["sampling_params"]["sampling_seed"]


def speaks(engine, *, cached=None):
    """One to four letters by the seed; the engine had one input token less a letter more."""

    async def script(request):
        await engine.open.wait()
        seed, asked = seed_of(request), len(json.loads(request.content)["input_ids"])
        text = "y" if seed % 2 == 0 else "n" * (1 + seed % 4)
        told = asked - len(text) if cached is None else cached
        return engine.say(request, text, prompt_tokens=asked, cached_tokens=told)

    return script


def expected(groups):
    """From the committed samples alone. A response has an end token after its letters."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.response_token_ids) for sample in samples]
    asked = [len(sample.prompt_token_ids) for sample in samples]
    oldest = [min(span.version for span in sample.spans) for sample in samples]
    had = sum(asked) - sum(length - 1 for length in lengths)
    return {
        "rollout/response_len/mean": statistics.mean(lengths),
        "rollout/response_len/median": statistics.median(lengths),
        "rollout/response_len/min": min(lengths),
        "rollout/response_len/max": max(lengths),
        "rollout/weight_version/mean": statistics.mean(oldest),
        "rollout/weight_version/median": statistics.median(oldest),
        "rollout/weight_version/min": min(oldest),
        "rollout/weight_version/mixed_version_ratio": 0.0,
        "rollout/repetition_frac": 0.0,
        "rollout/prefix_cache_hit_rate": had / sum(asked),
    }


def ties(groups, dropped=()):
    """``rollout/zero_std/`` of scored groups, and of those that a manifest names as dropped."""
    tied = [group.rewards[0] for group in groups if len(set(group.rewards)) == 1]
    named = [each.reason for each in dropped]
    assert all(reason.startswith("zero_std_") for reason in named)
    counts = Counter(f"{reward:.1f}" for reward in tied)
    counts.update(reason.removeprefix("zero_std_") for reason in named)
    total = len(groups) + len(named)
    return {
        "rollout/zero_std/ratio": sum(counts.values()) / total,
        **{f"rollout/zero_std/count_{reward}": n for reward, n in counts.items()},
    }


def require(rig, collection, dropped=(), num_devices=1):
    """Every metric of ``collection`` as its file has it."""
    groups = read_collection(rig.store, collection)
    metrics = collection.metrics
    refuse_undeclared(metrics)
    wanted = expected(groups) | ties(groups, dropped)
    assert {name: metrics.get(name) for name in wanted} == pytest.approx(wanted)
    found = {name for name in metrics if name.startswith("rollout/zero_std/")}
    assert found <= wanted.keys()
    tokens = sum(group.response_tokens for group in groups)
    assert metrics["perf/rollout_time"] == collection.seconds > 0
    assert metrics["perf/tokens_per_gpu_per_sec"] == pytest.approx(
        tokens / collection.seconds / num_devices
    )


async def collect(rig, producer):
    await producer.set_engines(TOKEN, ("http://one",))
    request = CollectRequest(run=rig.run, epoch=1, update=0, policy_version=0, consumed_through=-1)
    return await producer.collect(TOKEN, request)


@pytest.mark.parametrize("filters", [False, True])
async def test_a_sequential_collection(rig, filters):
    rig.engine.script = speaks(rig.engine)
    spec = rig.spec(
        core={"filter_zero_std_groups": filters},
        training={"rollout_batch_size": 8, "samples_per_prompt": 2},
        inference={"num_engines": 2, "tensor_parallel_size": 1},
    )
    collection = await collect(rig, rig.producer(spec))
    manifest = CollectionManifest.model_validate(rig.store.read_json(collection_manifest(0, 1)))
    assert bool(manifest.dropped) == filters
    require(rig, collection, manifest.dropped, num_devices=2)
    assert collection.metrics["rollout/zero_std/ratio"] > 0
    # Which groups tie follows from the seeds alone: even says "y", and only "y" is right.
    seeds = [[sampling_seed(17, "train", 2 * g + s, 0) % 2 for s in range(2)] for g in range(8)]
    if not filters:
        right = sum(pair == [0, 0] for pair in seeds)
        assert collection.metrics.get("rollout/zero_std/count_1.0", 0) == right


async def test_a_group_that_failed_counts_with_its_last_attempt_alone(rig):
    """Three siblings of the first attempt had everything in the cache, the fourth broke."""
    attempts = Counter()
    calm = speaks(rig.engine, cached=2)
    lavish = speaks(rig.engine, cached=6)

    async def script(request):
        prompt = bytes(json.loads(request.content)["input_ids"]).decode()
        attempts[prompt] += 1
        unlucky = next(iter(attempts))
        if prompt == unlucky and attempts[prompt] < 4:
            return await lavish(request)
        if prompt == unlucky and attempts[prompt] == 4:
            raise httpx.ReadError("connection closed")
        return await calm(request)

    rig.engine.script = script
    collection = await collect(rig, rig.producer(rig.spec()))
    assert list(attempts.values()) == [8, 4, 4, 4]
    assert collection.metrics["rollout/requeued_groups"] == 1
    asked = [
        len(sample.prompt_token_ids)
        for group in read_collection(rig.store, collection)
        for sample in group.samples
    ]
    rate = collection.metrics["rollout/prefix_cache_hit_rate"]
    assert rate == pytest.approx(2 * len(asked) / sum(asked))


@pytest.mark.parametrize("filters", [False, True])
async def test_fully_async_collections_with_groups_that_went_stale(rig, filters):
    rig.engine.script = speaks(rig.engine)
    spec = rig.async_spec(core={"filter_zero_std_groups": filters, "max_policy_lag": 1})
    run = AsyncRun(rig, spec)
    began = time.monotonic()
    await run.start()
    seconds = 0.0
    stale = 0.0
    for update in range(6):
        collection = await run.collect()
        seconds += collection.metrics["perf/rollout_time"]
        stale += collection.metrics["rollout/fully_async/stale_groups_filtered"]
        require(rig, collection, run.manifest(collection).dropped)
        run.train(collection)
        if update == 2:  # what waits is too old from now on
            await until(lambda: run.producer.snapshot()["completed_queue_groups"] >= 2)
            run.version += 3
        await run.publish()
    assert stale > 0
    assert seconds <= time.monotonic() - began  # no second belongs to two collections


async def test_a_failed_commit_loses_no_drop_and_counts_no_group_twice(rig, monkeypatch):
    rig.engine.script = speaks(rig.engine)
    spec = rig.async_spec(core={"filter_zero_std_groups": True, "max_policy_lag": 1})
    run = AsyncRun(rig, spec, num_prompts=2000)
    await run.start()
    run.train(await run.collect())
    await run.publish()
    await until(lambda: run.producer.snapshot()["completed_queue_groups"] == 4)
    run.version += 3  # the four that wait are too old
    await run.publish()
    write = rig.store.write_json

    def full(rel, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rig.store, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        await run.collect()
    monkeypatch.setattr(rig.store, "write_json", write)
    collection = await run.collect()
    require(rig, collection, run.manifest(collection).dropped)
    prefix = "rollout/fully_async/"
    assert collection.metrics[f"{prefix}stale_groups_filtered"] >= 4
    assert collection.metrics[f"{prefix}completed_queue/dropped_groups"] >= 4
    assert collection.metrics[f"{prefix}completed_queue/delivered_groups"] == 2


async def test_the_window_after_an_adopted_collection_begins_with_it(rig, monkeypatch):
    """Its manifest landed although the write failed; its seconds and drops are its own."""
    rig.engine.script = speaks(rig.engine)
    run = AsyncRun(rig, rig.async_spec(core={"max_policy_lag": 1}))
    began = time.monotonic()
    await run.start()
    first = await run.collect()
    run.train(first)
    await run.publish()
    await until(lambda: run.producer.snapshot()["completed_queue_groups"] == 4)
    run.version += 3  # the four that wait are too old
    await run.publish()
    write = rig.store.write_json

    def torn(rel, value):
        write(rel, value)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(rig.store, "write_json", torn)
    with pytest.raises(OSError, match="Input/output"):
        await run.collect()
    monkeypatch.setattr(rig.store, "write_json", write)
    adopted = await run.collect()
    require(rig, adopted)
    run.train(adopted)
    await run.publish()
    second = await run.collect()
    require(rig, second)
    collections = (first, adopted, second)
    assert sum(each.metrics["perf/rollout_time"] for each in collections) <= (
        time.monotonic() - began
    )
    stale = [each.metrics["rollout/fully_async/stale_groups_filtered"] for each in collections]
    assert stale[1] >= 4
    assert stale[0] == stale[2] == 0


async def test_another_producer_adopts_the_metrics_with_the_collection(rig):
    rig.engine.script = speaks(rig.engine)
    first = await collect(rig, rig.producer())
    asked = len(rig.engine.bodies)
    again = await collect(rig, rig.producer())
    assert again.metrics == first.metrics
    assert len(rig.engine.bodies) == asked
