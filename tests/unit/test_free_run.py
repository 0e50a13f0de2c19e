"""The free-running worker: when it begins groups, when it waits, and how it ends."""

import asyncio
import gc
import json
from itertools import pairwise

import httpx
import pytest
from structlog.testing import capture_logs

from activities.rollout import assembly, error_log
from activities.storage.layout import PIPELINE_LIFECYCLE, PIPELINE_OCCUPANCY, ROLLOUT_ERRORS
from activities.wire import contract
from models.errors import (
    ContractViolation,
    ServiceUnreachable,
    ServingFailureSustained,
    StaleFence,
)
from models.prompt import PromptDraw
from models.sample import SampleGroup
from tests.support.async_run import AsyncRun, held, until


class Gated:
    """Each call waits for its own event."""

    def __init__(self, engine):
        self.engine = engine
        self.calls = []
        engine.script = self.script

    async def script(self, request):
        self.calls.append(asyncio.Event())
        await self.calls[-1].wait()
        return await self.engine.answer(request)


@pytest.mark.parametrize(("granularity", "after_two_samples"), [("sample", 10), ("group", 8)])
async def test_a_group_begins_as_soon_as_there_is_room(rig, granularity, after_two_samples):
    """Eight samples in groups of two; calls 0 and 1 are the first group, 2 and 3 the second."""
    run = AsyncRun(
        rig, rig.async_spec(**{"async": {"rollout_submission_granularity": granularity}})
    )
    gated = Gated(rig.engine)
    await run.start()
    collecting = asyncio.ensure_future(run.collect())
    await until(lambda: len(gated.calls) == 8)
    unfinished = run.producer.snapshot()["producer_unfinished_samples"]
    assert unfinished == (8 if granularity == "sample" else None)
    gated.calls[0].set()
    await until(lambda: rig.engine.active == 7)
    await asyncio.sleep(0.05)
    assert len(gated.calls) == 8  # one sample of room is none
    gated.calls[2].set()
    await until(lambda: len(gated.calls) == after_two_samples)
    gated.calls[1].set()
    gated.calls[3].set()
    await until(lambda: len(gated.calls) == 12)
    collection = await collecting
    assert run.groups(collection) == [0, 1]
    run.require_accounted(collection)


async def test_permits_bound_the_calls_of_all_groups(rig):
    run = AsyncRun(rig, rig.async_spec(inference={"server_concurrency": 3, "num_engines": 2}))
    rig.engine.open.clear()
    await run.start()
    collecting = asyncio.ensure_future(run.collect())
    await until(lambda: rig.engine.active == 6)  # three an engine, whatever the router's address
    snapshot = run.producer.snapshot()
    assert (snapshot["http_capacity_requests"], snapshot["http_active_requests"]) == (6, 6)
    assert (snapshot["http_waiting_requests"], snapshot["generation_active_calls"]) == (2, 6)
    assert snapshot["generation_admission_waiters"] == 0
    rig.engine.open.set()
    await collecting
    assert rig.engine.max_active == 6


async def test_a_full_queue_stops_new_groups_and_nothing_else(rig):
    factor = {"async_data_buffer_capacity_factor": 1.0}
    run = AsyncRun(rig, rig.async_spec(**{"async": factor}))
    await run.start()
    first = await run.collect()
    await until(lambda: run.producer.snapshot()["producer_ready"]["groups"] > 0)
    await until(lambda: run.producer.snapshot()["producer_active_group_tasks"] == 0)
    sampled = len(rig.engine.bodies)
    await asyncio.sleep(0.1)
    snapshot = run.producer.snapshot()
    assert len(rig.engine.bodies) == sampled
    assert snapshot["completed_queue_groups"] == snapshot["completed_queue_capacity_groups"] == 2
    assert snapshot["completed_put_current_wait_seconds"] > 0
    ready = snapshot["producer_ready"]["groups"]
    assert ready <= 8  # budget of 8 samples, each group with one unfinished at least
    assert snapshot["producer_owned_groups"] == ready
    run.train(first)
    await run.publish()
    await run.updates(ready // 2 + 1)  # what was finished goes first
    await until(lambda: len(rig.engine.bodies) > sampled)
    assert run.producer.snapshot()["completed_put_wait_seconds"] > 0
    assert max(run.groups(run.trained[1])) < sampled // 2
    run.require_accounted(run.trained[-1])


async def test_the_stop_rule_holds_while_the_queue_is_full(rig, monkeypatch):
    run = AsyncRun(rig)
    await run.start()
    run.train(await run.collect())
    await run.publish()
    await until(lambda: run.producer.snapshot()["producer_ready"]["groups"] > 0)
    await until(lambda: run.producer.snapshot()["producer_active_group_tasks"] == 0)
    checks = []

    def check():
        checks.append(asyncio.get_running_loop().time())
        if len(checks) == 6:
            raise ServingFailureSustained("half of the attempts failed")

    monkeypatch.setattr(run.producer._parts.health, "check", check)
    await until(lambda: len(checks) == 6)
    gaps = [after - before for before, after in pairwise(checks)]
    assert sorted(gaps)[2] < 0.7  # every half second, a busy machine aside
    monkeypatch.undo()
    with pytest.raises(ServingFailureSustained):  # before any finished group is taken
        await run.collect()


async def test_the_stop_rule_holds_while_nothing_ends(rig, monkeypatch):
    run = AsyncRun(rig)
    Gated(rig.engine)
    await run.start()

    def check():
        if rig.engine.active == 8:
            raise ServingFailureSustained("half of the attempts failed")

    monkeypatch.setattr(run.producer._parts.health, "check", check)
    with pytest.raises(ServingFailureSustained):
        await run.collect()
    assert rig.engine.active == 0
    assert held((await run.producer.data_state(-1)).pending) == [0, 1, 2, 3]
    row = rig.store.read_jsonl(ROLLOUT_ERRORS).rows[-1]
    assert row["fatal"] == "ServingFailureSustained: half of the attempts failed"


async def test_a_fault_requeues_its_group_and_holds_new_ones_for_a_second(rig):
    run = AsyncRun(rig, rig.async_spec(**{"async": {"async_max_concurrent_samples": 2}}))
    times = []

    async def timed(request):
        times.append(asyncio.get_running_loop().time())
        return await rig.engine.answer(request)

    rig.engine.script = timed
    rig.engine.next_scripts.append(rig.engine.dropping())
    await run.start()
    collection = await run.collect()
    assert run.groups(collection) == [0, 1]
    assert collection.counts.failed_attempts == {"transport": 1}
    assert collection.metrics["rollout/max_requeues"] == 1
    times.sort()
    assert max(after - before for before, after in pairwise(times)) >= 0.99


async def test_many_faults_lose_and_double_nothing(rig):
    faults = [
        rig.engine.dropping(),
        rig.engine.failing(429, {}),
        rig.engine.failing(503, {"detail": contract.NO_HEALTHY_WORKERS}),
        rig.engine.failing(503, {"message": contract.WAITING_TIMEOUT}),
    ]
    calls = 0

    async def script(request):
        nonlocal calls
        calls += 1
        if calls % 17 == 0:
            return await faults[calls // 17 % 4](request)
        return await rig.engine.answer(request)

    rig.engine.script = script
    run = AsyncRun(rig, num_prompts=12)
    await run.start()
    await run.updates(6)
    prompts = run.trained_prompts()
    assert len(set(prompts)) == len(prompts) == 12
    for each in run.trained:
        run.require_accounted(each)


async def test_an_unknown_error_ends_everything_and_the_waiting_collection_raises_it(rig):
    run = AsyncRun(rig)
    gated = Gated(rig.engine)
    rig.engine.next_scripts.append(rig.engine.failing(500, {"detail": "x" * 2000}))
    await run.start()
    with pytest.raises(ContractViolation, match="status 500"):
        await run.collect()
    assert rig.engine.active == 0
    assert run.producer.snapshot()["producer_owned_groups"] == 0
    assert held((await run.producer.data_state(-1)).pending) == [0, 1, 2, 3]
    row = rig.store.read_jsonl(ROLLOUT_ERRORS).rows[-1]
    assert row["errors/fatal"] == 1
    assert row["fatal"].startswith("ContractViolation: ")
    assert len(row["fatal"]) <= len("ContractViolation: ") + 1024
    assert row["errors/requeued_groups"] == 0
    (report,) = [each for each in await run.producer.reports(0) if each.metrics["errors/fatal"]]
    assert report.metrics["errors/elapsed_seconds"] == row["errors/elapsed_seconds"]
    rig.engine.script = rig.engine.answer
    collection = await run.collect()  # asked again, it goes on with the same prompts
    run.require_accounted(collection)
    del gated


async def test_an_error_while_nobody_waits_is_raised_before_a_finished_group_is_taken(rig):
    run = AsyncRun(rig)
    await run.start()
    served = 0

    async def script(request):
        nonlocal served
        served += 1
        if served > 8:  # four groups are finished, two of them are taken
            return httpx.Response(500, json={})
        return await rig.engine.answer(request)

    rig.engine.script = script
    run.train(await run.collect())
    await until(lambda: not run.producer._free._run.is_running)
    assert run.producer.snapshot()["completed_queue_groups"] == 2
    await run.producer.begin_publication(run.token(), 1)
    await run.producer.end_publication(run.token(), 1)
    with pytest.raises(ContractViolation, match="status 500"):
        await run.collect()


async def test_a_worker_that_just_ends_is_fatal(rig):
    run = AsyncRun(rig)
    Gated(rig.engine)
    await run.start()
    waiting = asyncio.ensure_future(run.collect())
    await until(lambda: rig.engine.active == 8)
    run.producer._free._run._worker.cancel()
    with pytest.raises(ContractViolation, match="worker ended"):
        await waiting
    assert rig.engine.active == 0
    assert held((await run.producer.data_state(-1)).pending) == [0, 1, 2, 3]


async def test_no_engine_within_the_deadlines_is_unreachable_and_can_be_repeated(rig):
    spec = rig.async_spec(inference={"start_timeout_s": 0.05, "update_timeout_s": 0.05})
    run = AsyncRun(rig, spec)
    await run.publish()
    with pytest.raises(ServiceUnreachable, match="no engine"):
        await run.collect()
    assert (await run.producer.data_state(-1)).sample_group_index == 0
    await run.start()
    assert (await run.collect()).counts.groups == 2


async def test_a_silent_wait_is_told(rig, monkeypatch):
    monkeypatch.setattr(assembly, "SILENCE_S", 0.05)
    run = AsyncRun(rig)
    gated = Gated(rig.engine)
    await run.start()
    with capture_logs() as logs:
        collecting = asyncio.ensure_future(run.collect())
        await until(lambda: any(each["event"] == "no_group_completed" for each in logs))
    told = next(each for each in logs if each["event"] == "no_group_completed")
    assert told["groups_in_the_making"] == 4
    rig.engine.script = rig.engine.answer
    for call in gated.calls:
        call.set()
    await collecting


def test_the_silence_that_is_told_is_half_a_minute():
    assert assembly.SILENCE_S == 30.0


async def test_reports_are_numbered_bounded_and_at_the_end_too(rig):
    run = AsyncRun(rig)
    await run.start()
    await run.collect()
    for _ in range(300):
        await run.producer._parts.errors.report()
    reports = await run.producer.reports(0)
    assert [each.number for each in reports] == [*range(45, 301)]
    assert [each.number for each in await run.producer.reports(298)] == [299, 300]
    assert await run.producer.reports(300) == ()
    await run.producer.close()
    assert [each.number for each in await run.producer.reports(300)] == [301]
    rows = rig.store.read_jsonl(ROLLOUT_ERRORS).rows
    assert (len(rows), rows[-1]["fatal"], rows[-1]["errors/fatal"]) == (301, None, 0)


async def test_errors_are_reported_on_their_own_clock_though_nothing_is_trained(rig, monkeypatch):
    assert error_log.REPORT_INTERVAL_S == 15.0
    monkeypatch.setattr(error_log, "REPORT_INTERVAL_S", 0.02)
    run = AsyncRun(rig)
    Gated(rig.engine)
    rig.engine.next_scripts.append(rig.engine.dropping())
    await run.start()
    collecting = asyncio.ensure_future(run.collect())
    await until(lambda: len(run.producer._parts.errors.reports(0)) >= 3)
    newest = (await run.producer.reports(0))[-1]
    assert (
        newest.metrics["errors/transport_groups"] == newest.metrics["errors/requeued_groups"] == 1
    )
    run.revoke()
    with pytest.raises(StaleFence):
        await collecting


async def test_the_pipeline_is_observed_from_the_first_collection_to_the_shutdown(rig):
    run = AsyncRun(rig, rig.async_spec(core={"pipeline_observation_interval_s": 0.02}))
    await run.start()
    await run.collect()
    await until(lambda: run.producer.snapshot()["producer_ready"]["groups"] > 0)
    left = run.producer.snapshot()
    await asyncio.sleep(0.1)
    await run.producer.close()
    occupancy = rig.store.read_jsonl(PIPELINE_OCCUPANCY).rows
    assert len(occupancy) >= 2
    assert set(left) | {"time_unix"} == set(occupancy[0])
    events = rig.store.read_jsonl(PIPELINE_LIFECYCLE).rows
    assert [row["event"] for row in events] == ["shutdown_start", "shutdown_complete"]
    start, end = events
    assert set(end) == set(occupancy[0]) | {"event"}
    assert end["shutdown_unqueued"]["groups"] >= left["producer_ready"]["groups"]
    assert end["producer_ready"]["groups"] == end["producer_owned_groups"] == 0
    assert start["shutdown_unqueued"]["groups"] == 0
    assert end["completed_queue"] == start["completed_queue"]
    assert end["http_capacity_requests"] == 64
    assert end["errors/elapsed_seconds"] >= 0


@pytest.mark.parametrize("filters", [False, True])
async def test_nothing_grows_with_the_number_of_groups(rig, filters):
    run = AsyncRun(rig, rig.async_spec(core={"filter_zero_std_groups": filters}), num_prompts=5)
    await run.start()

    def live():
        gc.collect()
        # type() and not isinstance(): that asks some objects of torch, which warn when asked.
        return sum(type(each) in (PromptDraw, SampleGroup) for each in gc.get_objects())

    async def updates(count):
        await run.updates(count)
        run.trained = run.trained[-1:] * len(run.trained)
        rig.engine.bodies.clear()
        return live()

    early = await updates(10)
    late = await updates(60)
    # A queue of 4, a batch of 2, 8 samples in the making, one collection that is not forgotten.
    assert late <= max(early, 40) + 40
    assert len(run.producer._parts.source._ledger) <= 4 + 2 + 2 * 8 + 4 + 16 * 2 + 8
    assert await run.producer.data_state(run.update - 1)


async def test_a_policy_that_always_ties_still_gets_its_collections(rig):
    rig.engine.script = rig.engine.saying("n")
    run = AsyncRun(rig, rig.async_spec(core={"filter_zero_std_groups": True}))
    await run.start()
    collection = await run.collect()
    filtered = collection.counts.filtered_groups
    assert [*filtered] == ["zero_std_0.0"]
    assert 32 <= filtered["zero_std_0.0"] < 64
    assert collection.counts.mixed_reward_groups == 0
    assert collection.reward_mean == 0.0
    run.require_accounted(collection)


async def test_engine_calls_name_their_group_for_the_router(rig):
    headers = []

    async def script(request: httpx.Request):
        headers.append(request.headers["x-perdure-group"].split(";")[0])
        return await rig.engine.answer(request)

    rig.engine.script = script
    run = AsyncRun(rig)
    await run.start()
    await run.collect()
    groups = {}
    for body, group in zip(rig.engine.bodies, headers, strict=True):
        groups.setdefault(group, set()).add(json.dumps(body["input_ids"]))
    assert all(len(prompts) == 1 for prompts in groups.values())
