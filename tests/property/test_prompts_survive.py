"""Faults, stale groups, publications, dead epochs, kills and rewinds, in any order: each prompt of
each pass over the data is trained once, and after every commit

    drawn = trained + dropped + pending.
"""

import asyncio
import random
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from activities.rollout import recovery
from models.errors import PerdureError
from models.prompt import DataState
from tests.support.async_run import AsyncRun, held
from tests.support.quick_engines import QuickRouter
from tests.support.rollout_rig import RolloutRig

NUM_PROMPTS = 8
BATCH = 2

ACTIONS = (
    "update",
    "update",
    "update",
    "checkpoint",
    "evaluate",
    "collection that is not trained",
    "dead epoch while collecting",
    "dead epoch in a publication",
    "killed while collecting",
    "killed between updates",
    "trainer lost",
)


class Life(AsyncRun):
    """A run with engines that fail, and with the ends that a run may meet."""

    def __init__(self, rig, spec, rng, fault_share):
        self.router = QuickRouter(rng, fault_share)
        rig.connect = lambda url: self.router
        super().__init__(rig, spec, num_prompts=NUM_PROMPTS, held_out=2)
        self.rng = rng
        self.mode = spec.core.publication_mode
        self.saved = (0, 0, DataState())

    async def publish(self):
        await self.router.publish(self.producer, self.token(), self.version, self.mode)

    async def settle(self):
        """Some turns of the loop, a few of them long enough for a file to be written."""
        for _ in range(self.rng.randrange(60)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.random() * 0.02)

    async def update_once(self):
        collection = await self.collect()
        self.require_accounted(collection)
        self.train(collection)
        await self.publish()

    async def checkpoint(self):
        self.saved = (self.update, self.version, await self.producer.data_state(self.update - 1))

    async def interrupted_collect(self):
        collecting = asyncio.ensure_future(self.collect())
        await self.settle()
        return collecting

    async def next_epoch(self):
        self.revoke()
        await self.settle()
        await self.start()

    async def act(self, action):
        if action == "update":
            await self.update_once()
        elif action == "checkpoint":
            await self.checkpoint()
        elif action == "evaluate":
            assert (await self.evaluate()).samples == 2
        elif action == "collection that is not trained":
            self.require_accounted(await self.collect())
            await self.next_epoch()
        elif action == "dead epoch while collecting":
            collecting = await self.interrupted_collect()
            await self.next_epoch()
            with suppress(PerdureError):
                await collecting
        elif action == "dead epoch in a publication":
            await self.update_once()
            self.version += 1  # an update whose collection is of no matter here
            await self.producer.begin_publication(self.token(), self.version)
            await self.settle()
            await self.next_epoch()
        elif action == "killed while collecting":
            collecting = await self.interrupted_collect()
            await self.rebuild()
            with suppress(PerdureError):
                await collecting
            await self.start()
        elif action == "killed between updates":
            await self.rebuild()
            await self.start()
        elif action == "trainer lost":
            await self.producer.close()
            self.epoch += 1
            self.update, self.version, state = self.saved
            self.trained = self.trained[: self.update]
            self.build(state)
            await self.start()


async def live(root, seed, fault_share, actions, mode, options):
    rng = random.Random(seed)
    rig = RolloutRig(root)
    spec = rig.async_spec(
        core={
            "publication_mode": mode,
            "max_policy_lag": options["lag"],
            "filter_zero_std_groups": options["filters"],
        },
        **{
            "async": {
                "async_data_buffer_capacity_factor": 4.0,
                "async_unused_samples_handler": options["handler"],
                "rollout_submission_granularity": options["granularity"],
                "max_requeues": options["max_requeues"],
            }
        },
    )
    life = Life(rig, spec, rng, fault_share)
    try:
        await life.start()
        for action in actions:
            await life.act(action)
        await settle_accounts(life)
    finally:
        for producer in rig.producers:
            await producer.close()


async def killed_after(root, turns, mode):
    """Two updates, a kill after so many turns of the loop in the third collection, and on."""
    rig = RolloutRig(root)
    spec = rig.async_spec(
        core={"publication_mode": mode, "max_policy_lag": 2},
        **{"async": {"async_data_buffer_capacity_factor": 4.0}},
    )
    life = Life(rig, spec, random.Random(turns), 0.0)
    try:
        await life.start()
        for _ in range(2):
            await life.update_once()
        collecting = asyncio.ensure_future(life.collect())
        for _ in range(turns):
            await asyncio.sleep(0)
        await life.rebuild()
        await asyncio.gather(collecting, return_exceptions=True)
        await life.start()
        await settle_accounts(life)
    finally:
        for producer in rig.producers:
            await producer.close()


@pytest.mark.parametrize("mode", ["barrier", "refresh", "rolling"])
@pytest.mark.parametrize("turns", [0, 1, 3, 8, 20, 80])
def test_a_kill_at_any_turn_loses_and_doubles_nothing(tmp_path, turns, mode):
    asyncio.run(killed_after(tmp_path, turns, mode))


async def settle_accounts(life):
    """Everything drawn so far is trained or dropped in the end, once."""
    life.router.fault_share = 0.0
    await life.update_once()
    owed = set(held((await life.producer.data_state(life.update - 1)).pending))
    for _ in range(60):
        if not owed:
            break
        await life.update_once()
        owed &= set(held((await life.producer.data_state(life.update - 1)).pending))
    assert not owed
    prompts = life.trained_prompts()
    assert len(set(prompts)) == len(prompts)
    dropped = [
        (each.draw.prepared_sample_id, each.draw.epoch_id)
        for collection in life.trained
        for each in life.manifest(collection).dropped
    ]
    assert not set(prompts) & set(dropped)
    assert len(set(dropped)) == len(dropped)
    last = life.manifest(life.trained[-1]).data_after
    pending = [(draw.prepared_sample_id, draw.epoch_id) for draw in last.pending]
    drawn = [
        (f"task:train:{row}", epoch) for epoch in range(last.epoch_id) for row in range(NUM_PROMPTS)
    ]
    assert set(drawn) <= set(prompts) | set(dropped) | set(pending)


OPTIONS = st.fixed_dictionaries(
    {
        "lag": st.integers(0, 3),
        "filters": st.booleans(),
        "handler": st.sampled_from(["retry", "retry", "drop"]),
        "granularity": st.sampled_from(["sample", "group"]),
        "max_requeues": st.sampled_from([None, None, 1]),
    }
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    faulty=st.booleans(),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=12),
    mode=st.sampled_from(["barrier", "refresh", "rolling"]),
    options=OPTIONS,
)
def test_no_prompt_is_lost_or_doubled(seed, faulty, actions, mode, options):
    quick = patch.object(recovery, "RETRY_DELAY_S", 0.005)  # the back-off is of real seconds
    with quick, tempfile.TemporaryDirectory() as root:
        asyncio.run(live(Path(root), seed, 0.05 * faulty, actions, mode, options))
