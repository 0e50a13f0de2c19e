"""What a producer does while engines take new weights, in each publication mode."""

import asyncio
import json

import pytest

from activities.rollout import in_flight
from activities.verifiers.registry import VerifierSet
from models.errors import ContractViolation, ServiceUnreachable, StaleFence
from models.ids import FenceToken
from models.sample import Verdict, VerdictOutcome
from tests.support.async_run import AsyncRun, held, until


def run_in(rig, mode, **options):
    return AsyncRun(rig, rig.async_spec(core={"publication_mode": mode}), **options)


async def hanging(run, finished_calls=2):
    """Start the worker; a group finishes and goes into a batch that waits, the others hang."""
    served = 0
    engine = run.rig.engine

    async def script(request):
        nonlocal served
        served += 1
        if served > finished_calls:
            await engine.open.wait()
        return await engine.answer(request)

    engine.script = script
    engine.open.clear()
    await run.start()
    if finished_calls:
        engine.script = immediate(engine, script, finished_calls)
    collecting = asyncio.ensure_future(run.collect())
    await until(lambda: engine.active == 8)
    return collecting


def immediate(engine, otherwise, count):
    served = 0

    async def script(request):
        nonlocal served
        served += 1
        if served > count:
            return await otherwise(request)
        seed = json.loads(request.content)["sampling_params"]["sampling_seed"]
        return engine.say(request, "y" if seed % 2 == 0 else "n")

    return script


async def test_barrier_cancels_and_requeues_unfinished_groups_in_hand_out_order(rig):
    run = run_in(rig, "barrier")
    collecting = await hanging(run)
    bodies = len(rig.engine.bodies)
    run.version = 1
    await run.producer.begin_publication(run.token(), 1)
    assert rig.engine.active == 0
    snapshot = run.producer.snapshot()
    assert snapshot["producer_owned_groups"] == 0
    assert not snapshot["producer_admission_open"]
    source = run.producer._parts.source
    assert list(source._waiting) == [1, 2, 3, 4]
    await asyncio.sleep(0.7)  # more than a turn of the worker
    assert len(rig.engine.bodies) == bodies
    assert rig.engine.aborts == 0
    rig.engine.open.set()
    rig.engine.version = "1"
    await run.producer.end_publication(run.token(), 1)
    run.version = 0
    collection = await collecting  # it waited through the boundary
    assert run.groups(collection) == [0, 1]
    assert (collection.min_version, collection.max_version) == (0, 1)
    metrics = collection.metrics
    assert metrics["rollout/fully_async/aborted_groups_filtered"] == 4
    assert metrics["errors/requeued_groups"] == metrics["rollout/max_requeues"] == 0
    run.require_accounted(collection)


async def test_a_second_begin_does_nothing_and_the_end_once_is_enough(rig):
    run = run_in(rig, "barrier")
    collecting = await hanging(run, finished_calls=0)
    for attempt in (1, 2):
        await run.producer.begin_publication(run.token(attempt), 1)
    rig.engine.open.set()
    rig.engine.version = "1"
    for attempt in (2, 3):
        await run.producer.end_publication(run.token(attempt), 1)
    collection = await collecting
    assert collection.max_version == 1


async def test_engines_are_told_to_abort_when_groups_do_not_end(rig, monkeypatch):
    """A verifier that cannot be cancelled holds its group until the engines were told."""
    monkeypatch.setattr(in_flight, "JOIN_S", 0.05)

    class Stubborn:
        async def verify(self, prompt, target, text):
            while not rig.engine.aborts:
                try:
                    await asyncio.sleep(0.005)
                except asyncio.CancelledError:
                    continue
            return Verdict(target.name, VerdictOutcome.SCORE, 1.0)

        async def aclose(self):
            return None

    run = run_in(rig, "barrier", verifiers=VerifierSet({"exact": Stubborn}))
    await run.start()
    collecting = asyncio.ensure_future(run.collect())
    await until(lambda: len(rig.engine.bodies) == 8)
    await until(lambda: rig.engine.active == 0)
    await run.producer.begin_publication(run.token(), 1)
    assert rig.engine.aborts == 1
    assert run.producer.snapshot()["producer_owned_groups"] == 0
    run.revoke()
    with pytest.raises(StaleFence):
        await collecting


async def test_groups_that_never_end_fail_the_publication_and_it_can_be_repeated(rig, monkeypatch):
    monkeypatch.setattr(in_flight, "JOIN_S", 0.05)
    monkeypatch.setattr(in_flight, "ABORT_JOIN_S", 0.05)
    release = asyncio.Event()

    class Stubborn:
        async def verify(self, prompt, target, text):
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            return Verdict(target.name, VerdictOutcome.SCORE, 1.0)

        async def aclose(self):
            return None

    run = run_in(rig, "barrier", verifiers=VerifierSet({"exact": Stubborn}))
    await run.start()
    collecting = asyncio.ensure_future(run.collect())
    await until(lambda: len(rig.engine.bodies) == 8)
    await until(lambda: rig.engine.active == 0)
    with pytest.raises(ServiceUnreachable, match="4 cancelled group attempts still run"):
        await run.producer.begin_publication(run.token(1), 1)
    assert len((await run.producer.data_state(-1)).pending) == 4
    release.set()
    await run.producer.begin_publication(run.token(2), 1)
    rig.engine.version = "1"
    await run.producer.end_publication(run.token(2), 1)
    collection = await collecting
    run.require_accounted(collection)


async def test_refresh_holds_new_groups_only(rig):
    run = run_in(rig, "refresh")
    collecting = await hanging(run)
    bodies = len(rig.engine.bodies)
    await run.producer.begin_publication(run.token(), 1)
    assert rig.engine.active == 8  # nobody is cancelled
    assert not run.producer.snapshot()["producer_admission_open"]
    rig.engine.open.set()
    await until(lambda: rig.engine.active == 0)
    await asyncio.sleep(0.7)
    assert len(rig.engine.bodies) == bodies
    rig.engine.version = "1"
    await run.producer.end_publication(run.token(), 1)
    await until(lambda: len(rig.engine.bodies) > bodies)
    collection = await collecting
    assert collection.max_version == 0  # they were finished under the old weights
    assert collection.metrics["rollout/fully_async/aborted_groups_filtered"] == 0


async def test_rolling_closes_nothing_and_takes_the_new_version_at_once(rig):
    run = run_in(rig, "rolling")
    collecting = await hanging(run)
    await run.producer.begin_publication(run.token(), 1)
    assert run.producer.snapshot()["producer_admission_open"]
    rig.engine.version = "1"
    rig.engine.open.set()
    # A batch of version 0 and of version 1: each group is of one policy, the batch need not be.
    bodies = len(rig.engine.bodies)
    await until(lambda: len(rig.engine.bodies) > bodies)
    await run.producer.end_publication(run.token(), 1)
    collection = await collecting
    assert collection.max_version <= 1
    assert collection.metrics["rollout/fully_async/rejected_mixed_policy_groups"] == 0


async def test_the_end_of_another_version_is_refused(rig):
    run = run_in(rig, "refresh")
    await run.start()
    await run.producer.begin_publication(run.token(2), 1)
    with pytest.raises(ContractViolation, match="version 2 ends"):
        await run.producer.end_publication(run.token(2), 2)
    with pytest.raises(StaleFence):  # an attempt that was taken for dead
        await run.producer.end_publication(run.token(1), 1)
    assert not run.producer.snapshot()["producer_admission_open"]
    await run.producer.end_publication(run.token(2), 1)
    assert run.producer.snapshot()["producer_admission_open"]
    with pytest.raises(ContractViolation, match="version 0 begins"):
        await run.producer.begin_publication(run.token(3), 0)


@pytest.mark.parametrize("mode", ["barrier", "refresh", "rolling"])
async def test_a_new_epoch_forgets_a_boundary_that_nobody_ended(rig, mode):
    run = run_in(rig, mode)
    await run.start()
    run.train(await run.collect())
    await run.producer.begin_publication(run.token(), 1)
    stale = run.token()
    run.revoke()
    await run.producer.set_engines(run.token(), ("http://one",))
    with pytest.raises(StaleFence):
        await run.producer.end_publication(stale, 1)
    with pytest.raises(ContractViolation, match="but 0 is published"):
        await run.collect()
    await run.publish()
    await run.updates(3)
    prompts = run.trained_prompts()
    assert len(set(prompts)) == len(prompts) == 8
    run.require_accounted(run.trained[-1])


async def test_a_boundary_begins_before_the_first_collection_too(rig):
    run = run_in(rig, "barrier")
    await run.start()
    await run.publish()  # once more, by a retry
    assert rig.engine.bodies == []
    assert run.producer.snapshot()["producer_active_group_tasks"] == 0
    assert held((await run.producer.data_state(-1)).pending) == []


async def test_an_outranked_publication_is_refused(rig):
    run = run_in(rig, "refresh")
    await run.start()
    await run.producer.begin_publication(FenceToken(epoch=1, update=3, attempt=1), 1)
    with pytest.raises(StaleFence):
        await run.producer.begin_publication(FenceToken(epoch=1, update=2, attempt=9), 2)
