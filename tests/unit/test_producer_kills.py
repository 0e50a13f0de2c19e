"""A producer killed anywhere: its heir makes the same collections from the last manifest."""

import asyncio

import pytest

from activities.rollout.collection_file import read_collection
from activities.storage.layout import collection_manifest
from models.ids import FenceToken
from models.prompt import DataState
from models.rollout import CollectionManifest, CollectRequest

NUM_UPDATES = 4
NUM_PROMPTS = 7  # epochs end in the middle of collections


class Killed(Exception):
    """The producer's process is gone."""


def settings(rig):
    return rig.spec(
        core={"filter_zero_std_groups": True},
        training={"rollout_batch_size": 3, "samples_per_prompt": 2},
    )


async def run_updates(rig, epoch, first, state, kill_at=None):
    """Collections from ``first`` on, each at its own version; raises ``Killed`` at a request."""
    producer = rig.producer(settings(rig), state=state, num_prompts=NUM_PROMPTS)
    killed = asyncio.Event()
    served = 0

    async def script(request):
        nonlocal served
        served += 1
        if kill_at is not None and served == kill_at:
            killed.set()
            await asyncio.Event().wait()
        return await rig.engine.answer(request)

    rig.engine.script = script
    await producer.set_engines(FenceToken(epoch=epoch, update=first, attempt=1), ("http://one",))
    made = {}
    for update in range(first, NUM_UPDATES):
        rig.engine.version = str(update)
        request = CollectRequest(
            run=rig.run,
            epoch=epoch,
            update=update,
            policy_version=update,
            consumed_through=update - 1,
        )
        token = FenceToken(epoch=epoch, update=update, attempt=1)
        collecting = asyncio.ensure_future(producer.collect(token, request))
        death = asyncio.ensure_future(killed.wait())
        await asyncio.wait({collecting, death}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if killed.is_set():
            collecting.cancel()
            producer.revoke(epoch)
            await producer.close()
            raise Killed(update, made)
        made[update] = collecting.result()
    return made


@pytest.mark.parametrize("kill_at", [1, 4, 7, 10, 14, 19, 23])
async def test_a_kill_changes_no_collection(rig, kill_at):
    expected = await run_updates(rig, 1, 0, DataState())
    with pytest.raises(Killed) as death:
        await run_updates(rig, 2, 0, DataState(), kill_at)
    update, made = death.value.args
    state = DataState()
    if update > 0:  # the last consumed collection says where to start
        manifest = rig.store.read_json(collection_manifest(update - 1, 2))
        state = CollectionManifest.model_validate(manifest).data_after
    made |= await run_updates(rig, 3, update, state)
    assert [made[each].sha256 for each in range(NUM_UPDATES)] == [
        expected[each].sha256 for each in range(NUM_UPDATES)
    ]
    trained = [
        (group.prepared_sample_id, group.epoch_id)
        for collection in made.values()
        for group in read_collection(rig.store, collection)
    ]
    assert len(set(trained)) == len(trained) == 3 * NUM_UPDATES
