"""Dropped groups: named in the manifest, owed again when their collection is abandoned."""

import asyncio

from activities.rollout.attempt import sampling_seed
from activities.storage.layout import collection_manifest
from models.ids import FenceToken
from models.rollout import CollectionManifest, CollectRequest

ONE = ("http://one",)


def settings(rig):
    return rig.spec(
        core={"filter_zero_std_groups": True},
        training={"rollout_batch_size": 3, "samples_per_prompt": 2},
    )


def token(epoch, update=0):
    return FenceToken(epoch=epoch, update=update, attempt=1)


def request(rig, epoch):
    return CollectRequest(run=rig.run, epoch=epoch, update=0, policy_version=0, consumed_through=-1)


def manifest_of(rig, epoch):
    return CollectionManifest.model_validate(rig.store.read_json(collection_manifest(0, epoch)))


def tied_before_the_third_mixed():
    """(mixed, tied) draws of the first collection: "y" for an even sampling seed, else "n"."""
    mixed, tied = [], []
    for group in range(64):
        first, second = (sampling_seed(17, "train", 2 * group + each, 0) % 2 for each in range(2))
        if len(mixed) < 3:
            (tied if first == second else mixed).append(group)
    assert tied, "the seed must exercise the filter"
    return mixed, tied


async def test_the_manifest_names_each_dropped_group_with_its_reason(rig):
    _, tied = tied_before_the_third_mixed()
    producer = rig.producer(settings(rig))
    await producer.set_engines(token(1), ONE)
    collection = await producer.collect(token(1), request(rig, 1))
    dropped = manifest_of(rig, 1).dropped
    assert [each.draw.group_index for each in dropped] == tied
    for each in dropped:
        seed = sampling_seed(17, "train", each.draw.first_sample_index, 0)
        assert each.reason == ("zero_std_1.0" if seed % 2 == 0 else "zero_std_0.0")
    reasons = [each.reason for each in dropped]
    assert collection.counts.filtered_groups == {
        reason: reasons.count(reason) for reason in set(reasons)
    }


async def test_an_abandoned_collection_owes_its_dropped_groups(rig):
    """The producer lives on, its epoch does not: the same draws are made again, none is lost."""
    mixed, tied = tied_before_the_third_mixed()
    calm = rig.producer(settings(rig))
    await calm.set_engines(token(1), ONE)
    expected = await calm.collect(token(1), request(rig, 1))

    producer = rig.producer(settings(rig))
    held, scored = asyncio.Event(), 0

    async def script(asked):
        nonlocal scored
        scored += 1
        if scored > 2 * len(mixed + tied) - 1:  # one sample short of a batch
            held.set()
            await asyncio.Event().wait()
        return await rig.engine.answer(asked)

    rig.engine.script = script
    await producer.set_engines(token(2), ONE)
    collecting = asyncio.ensure_future(producer.collect(token(2), request(rig, 2)))
    async with asyncio.timeout(20):
        await held.wait()
    producer.revoke(2)
    await asyncio.gather(collecting, return_exceptions=True)
    rig.engine.script = rig.engine.answer
    owed = {draw.group_index for draw in (await producer.data_state(-1)).pending}
    assert owed >= set(mixed + tied)

    await producer.set_engines(token(3), ONE)
    again = await producer.collect(token(3), request(rig, 3))
    assert again.sha256 == expected.sha256
    assert manifest_of(rig, 3).dropped == manifest_of(rig, 1).dropped


async def test_an_heir_that_adopts_a_collection_owes_its_dropped_groups(rig):
    mixed, tied = tied_before_the_third_mixed()
    producer = rig.producer(settings(rig))
    await producer.set_engines(token(1), ONE)
    await producer.collect(token(1), request(rig, 1))
    heir = rig.producer(settings(rig))
    await heir.set_engines(token(1), ONE)
    await heir.collect(token(1), request(rig, 1))
    owed = [draw.group_index for draw in (await heir.data_state(-1)).pending]
    assert owed == sorted(mixed + tied)
    assert (await heir.data_state(0)).pending == ()
