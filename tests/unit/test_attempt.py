"""One attempt of a group across a publication: siblings, permits, cancellation, reports."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from activities.rollout.admission import AdmissionGate
from activities.rollout.attempt import GroupSampler, SamplingPlan
from activities.rollout.policy import ServedPolicy
from activities.verifiers.registry import build_verifiers
from activities.wire.client import EngineClient
from activities.wire.engine_pool import EnginePool
from models.errors import ContractViolation, GenerationFault
from models.prompt import PromptDraw
from models.sample import TokenSpan

DEADLINE_S = 10.0
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
PLAN = SamplingPlan(
    purpose="train",
    samples_per_prompt=3,
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    max_response_length=4,
    max_context_length=32,
    reward_zero_truncated=False,
    seed=17,
    request_timeout_s=DEADLINE_S,
    engine_wait_s=1.0,
)


class WatchedPolicy(ServedPolicy):
    """Counts the calls that a publication holds back."""

    held = 0

    async def released(self, timeout_s):
        self.held += self.publishing is not None
        await super().released(timeout_s)


class Engine:
    """Answers ``y`` and an end token; while ``pausing``, hands back ``y`` alone."""

    def __init__(self, policy):
        self.policy = policy
        self.pausing = asyncio.Event()
        self.pausing.set()
        self.open = asyncio.Event()
        self.bodies = []
        self.overrides = {}

    async def handle(self, request):
        body = json.loads(request.content)
        self.bodies.append(body)
        await self.open.wait()
        ids, finish = [ord("y"), 0], {"type": "stop", "matched": 0}
        if self.pausing.is_set():
            ids, finish = [ord("y")], ABORTED
        elif len(body["input_ids"]) > 6:
            ids = [0]  # it goes on after "y"
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "weight_version": str(self.policy.published),
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        answer = {"output_ids": ids, "meta_info": meta | self.overrides}
        return httpx.Response(200, json=answer)


class Rig:
    """A sampler over one engine, and what an attempt needs."""

    def __init__(self, prompt, rows=None, **plan):
        self.policy = WatchedPolicy(4)
        self.engine = Engine(self.policy)
        transport = httpx.MockTransport(self.engine.handle)
        self.pool = EnginePool(
            lambda url: EngineClient(url, vocab_size=256, context_length=4096, transport=transport)
        )
        self.gate = AdmissionGate(8)
        self.prompt = prompt
        self.samples = 0
        self.sampler = GroupSampler(
            replace(PLAN, **plan),
            self.pool,
            build_verifiers(),
            lambda ids: "".join(map(chr, ids)),
            (0,),
            rows,
        )

    def attempt(self, exact=None):
        draw = PromptDraw(
            group_index=3,
            first_sample_index=9,
            epoch_id=0,
            row=0,
            prepared_sample_id=self.prompt.metadata.prepared_sample_id,
        )
        work = self.sampler.attempt(
            draw, self.prompt, self.gate, policy=self.policy, exact=exact, on_sample=self._count
        )
        return asyncio.create_task(work)

    def _count(self):
        self.samples += 1

    async def until(self, condition):
        """Let the loop turn until the condition holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0)

    async def paused(self, running):
        """Begin a publication, hand back every response, and return once all wait for it."""
        await self.until(lambda: len(self.engine.bodies) == 3)
        self.policy.begin(5, holds=True)
        self.engine.open.set()
        await self.until(lambda: self.policy.held == 3)
        assert not running.done()


@pytest.fixture
async def make(rig):
    """Makes a ``Rig``; options as its own."""
    made = []

    async def make_rig(**options):
        made.append(Rig(rig.prompt(0), **options))
        await made[-1].pool.set_engines(("http://engine",))
        return made[-1]

    yield make_rig
    for each in made:
        await each.pool.aclose()


@pytest.fixture
async def attempts(make):
    return await make()


async def test_a_group_goes_on_across_a_publication(attempts):
    running = attempts.attempt()
    await attempts.paused(running)
    attempts.engine.pausing.clear()
    attempts.policy.end(5)
    group = await asyncio.wait_for(running, DEADLINE_S)
    assert [sample.sample_index for sample in group.samples] == [9, 10, 11]
    for sample in group.samples:
        assert sample.spans == [TokenSpan(4, 0, 1), TokenSpan(5, 1, 2)]
        assert (sample.text, sample.reward) == ("y", 1.0)
        assert (sample.is_mixed, sample.replay_version, sample.oldest_version) == (True, 5, 4)
    assert group.versions == {4, 5}
    assert attempts.samples == 3
    assert len(attempts.engine.bodies) == 6
    assert group.times is None


async def test_a_response_that_waits_for_new_weights_holds_its_permit(attempts):
    running = attempts.attempt()
    await attempts.paused(running)
    assert attempts.gate.active == 3
    attempts.engine.pausing.clear()
    attempts.policy.end(5)
    await asyncio.wait_for(running, DEADLINE_S)
    assert attempts.gate.active == 0


async def test_cancelling_at_a_publication_is_no_error_and_leaves_nothing(attempts):
    """What a publication behind a barrier does: the abort answers come, then the end."""
    running = attempts.attempt()
    await attempts.paused(running)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, DEADLINE_S)
    assert (attempts.gate.active, attempts.gate.waiting) == (0, 0)
    assert attempts.sampler.finished == {}
    assert len(attempts.engine.bodies) == 3


async def test_an_abort_before_the_publication_begins_ends_the_run(attempts):
    attempts.engine.open.set()
    with pytest.raises(ContractViolation, match=r"prompt group 3, sample 9.*no publication began"):
        await asyncio.wait_for(attempts.attempt(), DEADLINE_S)
    assert attempts.gate.active == 0


async def test_the_one_exact_version_has_no_publications(attempts):
    attempts.engine.open.set()
    attempts.engine.pausing.clear()
    group = await asyncio.wait_for(attempts.attempt(exact=4), DEADLINE_S)
    assert group.versions == {4}
    with pytest.raises(ContractViolation, match=r"sample 9, .*weight_version is '4', expected 5"):
        await asyncio.wait_for(attempts.attempt(exact=5), DEADLINE_S)


async def test_a_publication_beyond_the_deadline_requeues_the_group(make):
    attempts = await make(request_timeout_s=0.2)
    running = attempts.attempt()
    await attempts.paused(running)
    with pytest.raises(GenerationFault) as caught:
        await asyncio.wait_for(running, DEADLINE_S)
    assert caught.value.category == "timeout"
    assert attempts.gate.active == 0


async def test_routes_are_asked_for_by_plan(make):
    attempts = await make(routed_experts=True)
    attempts.engine.open.set()
    attempts.engine.pausing.clear()
    with pytest.raises(ContractViolation, match="sample 9: routed_experts is missing"):
        await asyncio.wait_for(attempts.attempt(), DEADLINE_S)
    assert all(body["return_routed_experts"] for body in attempts.engine.bodies)


async def test_an_observed_attempt_tells_its_times(make):
    rows = {}
    made = await make(rows=lambda file, row: rows.update({file: row}))
    made.engine.open.set()
    made.engine.pausing.clear()
    group = await asyncio.wait_for(made.attempt(), DEADLINE_S)
    assert [each.sample_index for each in group.times.samples] == [9, 10, 11]
    assert all(each.finished_monotonic is not None for each in group.times.samples)
    (row,) = rows.values()
    assert (row["group_index"], row["outcome"]) == (3, "complete")
    assert row["group_attempt"] == group.times.group_attempt
