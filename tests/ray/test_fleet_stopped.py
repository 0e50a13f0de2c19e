"""An actor whose process is stopped: it lives and answers nothing. It is found and replaced."""

import asyncio
import dataclasses
import os
import signal
from datetime import timedelta

import pytest
from fleet_rig import Run, kill, publish, statuses, update
from temporalio.testing import ActivityEnvironment

from activities.heartbeat import beating
from models.errors import ProducerLost
from models.rollout import CollectRequest
from workers.fleet import RayFleet, run_fleet

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]

SILENT_S = 3.0


async def test_a_stopped_producer_is_found_and_replaced(
    fleet: RayFleet,
    make_run,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run: Run = make_run()
    await fleet.prepare(run.token(), run.request())
    await publish(fleet, run, run.token(), 0)
    await update(fleet, run, 0)
    await publish(fleet, run, run.token(1), 1)
    before = await statuses(fleet, run)
    stopped = before["producer"].pid
    os.kill(stopped, signal.SIGSTOP)
    request.addfinalizer(lambda: kill(stopped))  # Ray's own kill waits until it goes on

    producer = fleet.producer(run.ref)
    asked = CollectRequest(
        run=run.ref, epoch=run.epoch, update=1, policy_version=1, consumed_through=0
    )
    activity = ActivityEnvironment()
    activity.info = dataclasses.replace(activity.info, heartbeat_timeout=timedelta(seconds=1))

    async def collect() -> None:
        await beating(
            producer.collect(run.token(1, 2), asked),
            "collect 1",
            producer.progress,
            silent_s=SILENT_S,
            stalled=ProducerLost,
        )

    with pytest.raises(ProducerLost, match="has not answered for 3 s"):
        await asyncio.wait_for(activity.run(collect), 10 * SILENT_S)

    # The producer alone is asked in vain; what lives answers within milliseconds.
    monkeypatch.setattr(run_fleet, "QUICK_TIMEOUT_S", 3 * SILENT_S)
    run.claim()
    report = await fleet.prepare(run.token(1), run.request(next_update=1))
    assert report.rebuilt == ("producer",)
    after = await statuses(fleet, run)
    assert after["trainer"].pid == before["trainer"].pid
    await publish(fleet, run, run.token(1, 3), 1)
    assert (await update(fleet, run, 1)).policy_version == 2
