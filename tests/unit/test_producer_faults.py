"""Serving faults: the whole group goes back, nothing is lost or doubled, unknown is fatal."""

import asyncio
import math

import httpx
import pytest

from activities.rollout.collection_file import read_collection
from activities.storage.layout import ROLLOUT_ERRORS
from activities.verifiers.registry import VerifierSet
from activities.wire import contract
from models.errors import (
    ConfigurationError,
    ContractViolation,
    ServiceUnreachable,
    ServingFailureSustained,
)
from models.ids import FenceToken
from models.rollout import CollectRequest
from models.sample import Verdict, VerdictOutcome

ONE = ("http://one",)
TOKEN = FenceToken(epoch=1, update=0, attempt=1)


async def collect(rig, producer, update=0, timeout_s=20):
    request = CollectRequest(
        run=rig.run, epoch=1, update=update, policy_version=0, consumed_through=update - 1
    )
    async with asyncio.timeout(timeout_s):
        return await producer.collect(FenceToken(epoch=1, update=update, attempt=1), request)


KNOWN = [
    ("transport", lambda engine: engine.dropping()),
    ("overload", lambda engine: engine.failing(503, {"message": contract.QUEUE_FULL})),
    ("overload", lambda engine: engine.failing(429, {})),
    ("unavailable", lambda engine: engine.failing(503, {"detail": contract.NO_HEALTHY_WORKERS})),
    ("timeout", lambda engine: engine.failing(503, {"message": contract.RUNNING_TIMEOUT})),
]


@pytest.mark.parametrize(("category", "fault"), KNOWN)
async def test_a_known_fault_requeues_the_group_once(rig, category, fault):
    clean = rig.producer()
    await clean.set_engines(TOKEN, ONE)
    expected = await collect(rig, clean)
    rig.store.remove_tree("rollouts")
    rig.engine.bodies.clear()

    producer = rig.producer()
    await producer.set_engines(TOKEN, ONE)
    rig.engine.next_scripts.append(fault(rig.engine))
    collection = await collect(rig, producer)
    assert collection.counts.failed_attempts == {category: 1}
    assert collection.sha256 == expected.sha256  # same identities, same seeds, same samples
    rids = [body["rid"] for body in rig.engine.bodies]
    assert len(set(rids)) == len(rids) == 16 + 4  # no request id is used twice
    assert collection.metrics["rollout/requeued_groups"] == 1
    assert collection.metrics["rollout/max_requeues"] == 1
    assert rig.engine.active == 0


async def test_siblings_are_cancelled_and_joined(rig):
    producer = rig.producer()
    await producer.set_engines(TOKEN, ONE)
    rig.engine.open.clear()
    rig.engine.next_scripts.append(rig.engine.dropping())
    caller = asyncio.ensure_future(collect(rig, producer))
    while rig.engine.cancelled < 3:
        await asyncio.sleep(0)
    assert rig.engine.active == 12  # the three other groups go on
    rig.engine.open.set()
    collection = await caller
    assert collection.counts.groups == 4
    assert rig.engine.cancelled == 3


async def test_faults_under_load_lose_and_double_no_prompt(rig):
    rig.engine.script = chaotic(rig.engine, every=23)
    producer = rig.producer()
    await producer.set_engines(TOKEN, ONE)
    seen = []
    for update in range(4):
        groups = read_collection(rig.store, await collect(rig, producer, update, 50))
        seen += [(group.prepared_sample_id, group.epoch_id) for group in groups]
        assert [sample.sample_index for group in groups for sample in group.samples] == [
            *range(16 * update, 16 * update + 16)
        ]
    assert len(set(seen)) == len(seen) == 16
    state = await producer.data_state(3)
    assert state.pending == ()


def chaotic(engine, every):
    """Every ``every``-th request fails, in turn by each kind of known fault."""
    count = 0

    async def script(request):
        nonlocal count
        count += 1
        if count % every == 0:
            _, fault = KNOWN[count // every % len(KNOWN)]
            return await fault(engine)(request)
        return await engine.answer(request)

    return script


async def test_new_submissions_wait_a_second_after_a_fault(rig):
    times = []

    async def timed(request):
        times.append(asyncio.get_running_loop().time())
        return await rig.engine.answer(request)

    rig.engine.script = timed
    rig.engine.next_scripts.append(rig.engine.dropping())
    producer = rig.producer()
    await producer.set_engines(TOKEN, ONE)
    await collect(rig, producer)
    assert sorted(times)[-4] - min(times) >= 0.99


UNKNOWN = [
    lambda engine: engine.failing(500, {"detail": contract.WORKER_UNAVAILABLE}),
    lambda engine: engine.failing(503, {"message": "Using priority is disabled."}),
    lambda engine: engine.failing(503, ["a", "list"]),
    lambda engine: engine.failing(400, {"message": contract.QUEUE_FULL}),
    lambda engine: engine.failing(404, {}),
    lambda engine: engine.saying("y", "abort"),
    lambda engine: engine.saying("y", output_token_logprobs=None),
]


@pytest.mark.parametrize("fault", UNKNOWN)
async def test_an_unknown_failure_is_fatal_and_gives_every_prompt_back(rig, fault):
    producer = rig.producer()
    await producer.set_engines(TOKEN, ONE)
    rig.engine.next_scripts.append(fault(rig.engine))
    with pytest.raises(ContractViolation):
        await collect(rig, producer)
    assert rig.engine.active == 0
    state = await producer.data_state(-1)
    assert [draw.group_index for draw in state.pending] == [0, 1, 2, 3]
    row = rig.store.read_jsonl(ROLLOUT_ERRORS).rows[-1]
    assert row["errors/fatal"] == 1
    assert row["fatal"].startswith("ContractViolation: ")
    # the next call starts over with the same prompts
    groups = read_collection(rig.store, await collect(rig, producer))
    assert [group.group_index for group in groups] == [0, 1, 2, 3]


async def test_a_request_over_its_deadline_is_a_timeout(rig):
    async def never(request):
        await asyncio.Event().wait()

    rig.engine.next_scripts.append(never)
    producer = rig.producer(rig.spec(inference={"request_timeout_s": 0.2}))
    await producer.set_engines(TOKEN, ONE)
    collection = await collect(rig, producer)
    assert collection.counts.failed_attempts == {"timeout": 1}


async def test_calls_to_a_removed_engine_fail_as_transport_and_move(rig):
    one, two = rig.engines.values()
    one.open.clear()
    producer = rig.producer()
    await producer.set_engines(TOKEN, ONE)
    caller = asyncio.ensure_future(collect(rig, producer))
    while one.active < 16:
        await asyncio.sleep(0)
    await producer.set_engines(TOKEN, ("http://two",))
    assert one.active == 0
    collection = await caller
    assert collection.counts.failed_attempts == {"transport": 4}
    assert len(two.bodies) == 16


async def test_a_dead_engine_does_not_draw_every_group(rig):
    one, two = rig.engines.values()
    one.script = one.dropping()
    producer = rig.producer()
    await producer.set_engines(TOKEN, tuple(rig.engines))
    collection = await collect(rig, producer)
    assert collection.counts.failed_attempts == {"transport": 2}  # those already sent there
    assert len(two.bodies) == 16


async def test_the_stop_rule_ends_a_collection_that_only_fails(rig):
    now = 0.0

    def clock():
        nonlocal now
        now += 4.0
        return now

    async def refusing(request):
        raise httpx.ConnectError("refused")

    rig.engine.script = refusing
    producer = rig.producer(clock=clock)
    await producer.set_engines(TOKEN, ONE)
    with pytest.raises(ServingFailureSustained, match=r"'transport': \d+"):
        await collect(rig, producer)
    state = await producer.data_state(-1)
    assert [draw.group_index for draw in state.pending] == [0, 1, 2, 3]


async def test_no_engine_within_the_deadlines_is_unreachable(rig):
    spec = rig.spec(inference={"start_timeout_s": 0.05, "update_timeout_s": 0.05})
    producer = rig.producer(spec)
    with pytest.raises(ServiceUnreachable, match="no engine"):
        await collect(rig, producer)


class Failing:
    """Fails on the answers that ``choose`` picks."""

    def __init__(self, choose):
        self._choose = choose

    async def verify(self, prompt, target, text):
        if self._choose(prompt):
            return Verdict(target.name, VerdictOutcome.ERROR, math.nan, 1.0, "it broke")
        return Verdict(target.name, VerdictOutcome.SCORE, 0.0)

    async def aclose(self):
        pass


async def test_a_group_without_a_score_is_replaced_not_zeroed(rig):
    first = rig.producer()
    await first.set_engines(TOKEN, ONE)
    groups = read_collection(rig.store, await collect(rig, first))
    rig.store.remove_tree("rollouts")
    broken_id = groups[1].prepared_sample_id
    verifiers = VerifierSet(
        {"exact": lambda: Failing(lambda each: each.metadata.prepared_sample_id == broken_id)}
    )
    producer = rig.producer(verifiers=verifiers)
    await producer.set_engines(TOKEN, ONE)
    collection = await collect(rig, producer)
    groups = read_collection(rig.store, collection)
    assert [group.group_index for group in groups] == [0, 2, 3, 4]
    assert collection.counts.filtered_groups == {"verifier_error": 1}
    assert collection.metrics["rollout/error_verdicts"] == 4
    assert collection.reward_mean == 0.0
    assert (await producer.data_state(0)).pending == ()


async def test_a_verifier_that_always_fails_ends_the_collection(rig):
    producer = rig.producer(verifiers=VerifierSet({"exact": lambda: Failing(lambda _: True)}))
    await producer.set_engines(TOKEN, ONE)
    with pytest.raises(ContractViolation, match=r"could not be scored.*it broke"):
        await collect(rig, producer)


async def test_an_unregistered_verifier_is_named(rig):
    producer = rig.producer(verifiers=VerifierSet({}))
    await producer.set_engines(TOKEN, ONE)
    with pytest.raises(ConfigurationError, match="'exact'"):
        await collect(rig, producer)


async def test_error_rows_at_exit_and_a_full_disk_is_only_logged(rig, monkeypatch):
    producer = rig.producer()
    await producer.set_engines(TOKEN, ONE)
    rig.engine.next_scripts.append(rig.engine.dropping())
    await collect(rig, producer)
    await producer.close()
    row = rig.store.read_jsonl(ROLLOUT_ERRORS).rows[-1]
    assert row["fatal"] is None
    assert row["errors/fatal"] == 0
    assert row["errors/completed_group_attempts"] == 5
    assert row["errors/requeued_groups"] == row["errors/transport_groups"] == 1
    assert row["errors/failure_fraction_5m"] == pytest.approx(0.2)

    def full(rel, row):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rig.store, "append_jsonl", full)
    other = rig.producer()
    await other.set_engines(TOKEN, ONE)
    await collect(rig, other)
    await other.close()
