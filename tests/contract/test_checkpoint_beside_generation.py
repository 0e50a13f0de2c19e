"""A checkpoint of a fully async run: a real engine goes on decoding while the trainer writes."""

import asyncio
from pathlib import Path
from typing import Any

from activities.checkpoint import checkpoint
from activities.rollout.producer import RolloutProducer
from activities.storage.commit import read_cursor
from activities.storage.store import Store
from activities.wire.client import EngineClient
from models.checkpoint import CheckpointRequest
from models.ids import FenceToken, RunRef
from models.rollout import CollectRequest
from tests.support.fake_fleet import FakeFleet
from tests.support.publication_bench import async_document, publication_bench
from tests.support.rollout_rig import RolloutRig

DEADLINE_S = 60.0
MANY_TOKENS = 400
"""A hundred decoding steps of the engine's four slots: no rest of work that was begun before."""
SECTIONS: dict[str, dict[str, Any]] = {
    "async": {"async_max_concurrent_samples": 8, "async_data_buffer_capacity_factor": 500.0},
    "core": {"max_context_length": 4096, "max_policy_lag": 6},
    "inference": {"max_response_length": 2000, "max_running_requests": 4, "max_queued_requests": 4,
                  "server_concurrency": 8},
}  # fmt: skip


class FleetWithProducer(FakeFleet):
    """A fake trainer beside a real producer."""

    rollouts: RolloutProducer

    def producer(self, run: RunRef) -> Any:
        return self.rollouts


class RealEngineRig(RolloutRig):
    """The rig of the rollout tests on engines that serve HTTP."""

    def connect(self, url: str) -> EngineClient:
        return EngineClient(url, vocab_size=320, context_length=4096)


async def test_tokens_are_sampled_while_the_trainer_writes(
    engine: Any, native_url: str, tmp_path: Path
) -> None:
    named = await engine.http.post("/update_weight_version", json={"new_version": "0"})
    assert named.status_code == 200
    rig = RealEngineRig(tmp_path)
    producer = rig.producer(rig.async_spec(**SECTIONS), num_prompts=2000)
    fleet = FleetWithProducer(num_engines=1)
    fleet.rollouts = producer
    bench = await publication_bench(fleet, async_document(tmp_path))
    token = FenceToken(epoch=1, update=0, attempt=1)
    async with asyncio.timeout(DEADLINE_S):
        await producer.set_engines(token, (native_url,))
        await producer.begin_publication(token, 0)
        await producer.end_publication(token, 0)
        collected = await producer.collect(
            token,
            CollectRequest(run=bench.run, epoch=1, update=0, policy_version=0, consumed_through=-1),
        )
        fleet.live_trainer.next_update = 1
        write = fleet.script.hold("save 0")
        saving = asyncio.create_task(
            bench.activity.run(
                checkpoint,
                bench.site,
                CheckpointRequest(run=bench.run, epoch=1, update=0, policy_version=0),
                FenceToken(epoch=1, update=1, attempt=3001),
            )
        )
        await fleet.script.reached("save 0")
        before = await _generated_tokens(engine)
        while await _generated_tokens(engine) < before + MANY_TOKENS:
            await asyncio.sleep(0.01)
        assert producer.snapshot()["generation_active_calls"] > 0
        assert producer.snapshot()["generation_admission_paused"] is False
        assert not saving.done()
        write.set()
        reference = await saving
    cursor = read_cursor(Store(bench.run.root), reference)
    await producer.close()
    pending = [draw.group_index for draw in cursor.pending]
    trained = set(range(cursor.sample_group_index)) - set(pending)
    assert len(trained) == collected.counts.groups
    assert pending == sorted(pending)


async def _generated_tokens(engine: Any) -> int:
    load = (await engine.http.get("/v1/loads")).json()["loads"][0]
    return int(load["generated_tokens"])
