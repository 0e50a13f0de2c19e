"""A response in segments: over real HTTP, with answers as a served SGLang 0.5.17 gave them."""

import asyncio
import base64
from functools import partial

import pytest

from activities.rollout.attempt import sampling_seed
from activities.rollout.policy import ServedPolicy
from activities.rollout.segments import ResponseTask, SegmentedResponse
from activities.wire.client import EngineClient
from activities.wire.contract import SamplingParams
from activities.wire.engine_pool import EnginePool
from models.errors import ContractViolation, GenerationFault
from models.sample import FinishReason, PrefixUse, TokenSpan
from tests.support.scripted_server import ScriptedServer

PROMPT = (1, 2, 3)
EOS = 0
BUDGET = 6
DEADLINE_S = 10.0
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
QUEUE_ABORT = {"type": "abort", "message": "Abort in waiting queue"}


class WatchedPolicy(ServedPolicy):
    """Tells when a call is held back."""

    def __init__(self, published):
        super().__init__(published)
        self.held = asyncio.Event()

    async def released(self, timeout_s):
        if self.publishing is not None:
            self.held.set()
        await super().released(timeout_s)


def logprobs(ids):
    """A value of its own for each token."""
    return [-token / 8 for token in ids]


def body(request, ids, reason, version, **meta):
    """A whole answer."""
    finish = {"type": reason, "matched": EOS} if isinstance(reason, str) else reason
    told = {
        "id": request["rid"],
        "finish_reason": finish,
        "prompt_tokens": len(request["input_ids"]),
        "weight_version": version,
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-token / 8, token, None] for token in ids],
        "output_token_logprobs_length": len(ids),
        "completion_tokens": len(ids),
        "cached_tokens": 2,
        "dp_rank": None,
        "e2e_latency": 0.5,
    }
    return {"text": "...", "output_ids": ids, "meta_info": told | meta}


def says(ids, reason="stop", version="4", *, first=lambda: None, **meta):
    """A script that calls ``first`` and answers."""

    async def script(request):
        first()
        return 200, body(request, ids, reason, version, **meta)

    return script


def replies(answer, *, first=lambda: None):
    async def script(request):
        first()
        return answer

    return script


def gated(*, first=lambda: None):
    """As a paused engine answers what it never let in: it names the request."""

    async def script(request):
        first()
        return 499, {"error": {"message": f"Request {request['rid']} was aborted"}}

    return script


def aborted_in_queue(*, first=lambda: None):
    """No token, and none of the fields that would tell about some."""

    async def script(request):
        first()
        meta = {"id": request["rid"], "finish_reason": QUEUE_ABORT, "weight_version": "4"}
        return 200, {"text": "", "output_ids": [], "meta_info": meta | {"completion_tokens": 0}}

    return script


@pytest.fixture
async def server():
    async with ScriptedServer() as served:
        yield served


@pytest.fixture
def policy():
    return WatchedPolicy(4)


def task(**changes):
    fields = {
        "where": "prompt group 3, sample 12",
        "prompt_token_ids": PROMPT,
        "sampling": SamplingParams(max_new_tokens=BUDGET),
        "seed": partial(sampling_seed, 17, "train", 12),
        "end_token_ids": (EOS,),
        "exact": None,
        "routed_experts": False,
        "timeout_s": DEADLINE_S,
    }
    return ResponseTask(**(fields | changes))


async def generate(server, policy, **changes):
    pool = EnginePool(lambda url: EngineClient(url, vocab_size=99, context_length=16))
    await pool.set_engines((server.url,))
    try:
        async with asyncio.timeout(2 * DEADLINE_S), pool.reserve(1, timeout_s=1) as route:
            return await SegmentedResponse(task(**changes), policy).generate(route)
    finally:
        await pool.aclose()


def begins(policy, version=5, *, holds=True):
    """What a publication does before it pauses engines."""
    return lambda: policy.begin(version, holds=holds)


async def goes_on(server, policy, calls, version=5, **changes):
    """``generate``, with the publication of ``version`` ended once the response waits for it."""
    running = asyncio.create_task(generate(server, policy, **changes))
    await asyncio.wait_for(policy.held.wait(), DEADLINE_S)
    assert len(server.bodies) == calls, "nothing is sent while a publication holds calls back"
    policy.end(version)
    return await running


async def test_an_undisturbed_response_is_one_call(server, policy):
    server.then(says([10, 11, EOS]))
    response = await generate(server, policy)
    assert response.token_ids == [10, 11, EOS]
    assert response.logprobs == logprobs([10, 11, EOS])
    assert response.spans == [TokenSpan(4, 0, 3)]
    assert (response.finish_reason, response.routed_experts) == (FinishReason.STOP, None)
    assert response.prefix_use == PrefixUse(input_tokens=3, cached_tokens=2)
    (sent,) = server.bodies
    assert (sent["input_ids"], sent["return_logprob"]) == ([1, 2, 3], True)
    assert sent["sampling_params"]["max_new_tokens"] == BUDGET
    assert sent["sampling_params"]["sampling_seed"] == sampling_seed(17, "train", 12, 4)


async def test_a_response_goes_on_under_the_new_weights(server, policy):
    server.then(says([10, 11], ABORTED, "4", first=begins(policy)), says([12, EOS], version="5"))
    response = await goes_on(server, policy, calls=1)
    assert response.token_ids == [10, 11, 12, EOS]
    assert response.logprobs == logprobs([10, 11, 12, EOS])
    assert response.spans == [TokenSpan(4, 0, 2), TokenSpan(5, 2, 4)]
    assert response.finish_reason is FinishReason.STOP
    assert response.prefix_use == PrefixUse(input_tokens=3 + 5, cached_tokens=2 + 2)
    first, second = server.bodies
    assert second["input_ids"] == [1, 2, 3, 10, 11]
    assert second["sampling_params"]["max_new_tokens"] == BUDGET - 2
    same = {"max_new_tokens": 0, "sampling_seed": 0}
    assert first["sampling_params"] | same == second["sampling_params"] | same
    assert len(first["rid"]) == len(second["rid"]) == 32
    assert first["rid"] != second["rid"]


async def test_segments_draw_from_different_seeds(server, policy):
    server.then(says([10, 11], ABORTED, "4", first=begins(policy)), says([12, EOS], version="5"))
    await goes_on(server, policy, calls=1)
    seeds = [sent["sampling_params"]["sampling_seed"] for sent in server.bodies]
    assert seeds == [
        sampling_seed(17, "train", 12, 4),
        sampling_seed(17, "train", 12, 5, tokens_so_far=2),
    ]
    assert len({sampling_seed(17, "train", 12, 5, tokens) for tokens in range(9)}) == 9


async def test_three_versions_in_one_response(server, policy):
    def ends_and_begins():
        policy.begin(6, holds=True)

    server.then(
        says([10, 11], ABORTED, "4", first=begins(policy)),
        says([12], ABORTED, "5", first=ends_and_begins),
        says([13, 14], {"type": "length", "length": 3}, "6"),
    )
    running = asyncio.create_task(generate(server, policy))
    for version in (5, 6):
        await asyncio.wait_for(policy.held.wait(), DEADLINE_S)
        policy.held.clear()
        policy.end(version)
    response = await running
    assert response.spans == [TokenSpan(4, 0, 2), TokenSpan(5, 2, 3), TokenSpan(6, 3, 5)]
    assert response.finish_reason is FinishReason.LENGTH
    assert [sent["sampling_params"]["max_new_tokens"] for sent in server.bodies] == [6, 4, 3]


async def test_a_publication_that_was_abandoned_leaves_one_span(server, policy):
    server.then(says([10, 11], ABORTED, "4", first=begins(policy)), says([12, EOS], version="4"))
    running = asyncio.create_task(generate(server, policy))
    await asyncio.wait_for(policy.held.wait(), DEADLINE_S)
    policy.abandon()
    assert (await running).spans == [TokenSpan(4, 0, 4)]


@pytest.mark.parametrize("untouched", [aborted_in_queue, gated])
async def test_what_no_token_was_made_of_is_sent_as_it_was(server, policy, untouched):
    server.then(untouched(first=begins(policy)), says([10, EOS], version="5"))
    response = await goes_on(server, policy, calls=1)
    assert response.spans == [TokenSpan(5, 0, 2)]
    assert response.prefix_use == PrefixUse(input_tokens=3, cached_tokens=2)
    first, second = server.bodies
    assert first.pop("rid") != second.pop("rid")
    assert second["sampling_params"].pop("sampling_seed") == sampling_seed(17, "train", 12, 5)
    assert first["sampling_params"].pop("sampling_seed") == sampling_seed(17, "train", 12, 4)
    assert first == second


async def test_a_second_segment_that_was_gated_keeps_the_first(server, policy):
    server.then(
        says([10, 11], ABORTED, "4", first=begins(policy)),
        gated(first=begins(policy, 6)),
        says([12, EOS], version="6"),
    )
    running = asyncio.create_task(generate(server, policy))
    for version in (5, 6):
        await asyncio.wait_for(policy.held.wait(), DEADLINE_S)
        policy.held.clear()
        policy.end(version)
    assert (await running).spans == [TokenSpan(4, 0, 2), TokenSpan(6, 2, 4)]
    assert server.bodies[1]["input_ids"] == server.bodies[2]["input_ids"]


@pytest.mark.parametrize(
    ("ids", "reason"),
    [([10, EOS], FinishReason.STOP), ([10, 11, 12, 13, 14, 15], FinishReason.LENGTH)],
)
async def test_a_partial_response_that_is_whole_is_not_sent_again(server, policy, ids, reason):
    server.then(says(ids, ABORTED, "4", first=begins(policy)))
    response = await generate(server, policy)
    assert (response.token_ids, response.finish_reason) == (ids, reason)
    assert response.spans == [TokenSpan(4, 0, len(ids))]
    assert len(server.bodies) == 1


async def test_a_call_that_comes_during_a_publication_waits_for_it(server, policy):
    policy.begin(5, holds=True)
    server.then(says([10, EOS], version="5"))
    response = await goes_on(server, policy, calls=0)
    assert response.spans == [TokenSpan(5, 0, 2)]


async def test_tokens_lost_to_a_running_timeout_are_a_serving_fault(server, policy):
    lost = {"object": "error", "message": "Request running timeout reached.", "code": 503}
    server.then(replies((503, lost), first=begins(policy)))
    with pytest.raises(GenerationFault) as caught:
        await generate(server, policy)
    assert caught.value.category == "timeout"


async def test_one_deadline_covers_calls_and_publications(server, policy):
    server.then(says([10, 11], ABORTED, "4", first=begins(policy)))
    with pytest.raises(GenerationFault, match="held this call back") as caught:
        await generate(server, policy, timeout_s=0.5)
    assert caught.value.category == "timeout"
    assert len(server.bodies) == 1


async def test_the_second_segment_has_what_is_left_of_the_deadline(server, policy):
    never = asyncio.Event()

    async def hangs(request):
        await never.wait()

    server.then(says([10, 11], ABORTED, "4", first=begins(policy)), hangs)
    with pytest.raises(GenerationFault, match=r"no answer after 0\.\d+ s") as caught:
        await goes_on(server, policy, calls=1, timeout_s=1.0)
    never.set()
    assert caught.value.category == "timeout"


async def test_a_response_that_is_cancelled_while_it_waits_ends(server, policy):
    server.then(says([10, 11], ABORTED, "4", first=begins(policy)))
    running = asyncio.create_task(generate(server, policy))
    await asyncio.wait_for(policy.held.wait(), DEADLINE_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_each_engine_of_a_rolling_publication_may_serve_either_version(server, policy):
    policy.begin(5, holds=False)
    for version in (4, 5):
        server.then(says([10, EOS], version=str(version)))
        assert (await generate(server, policy)).spans == [TokenSpan(version, 0, 2)]


async def test_an_engine_that_tells_spans_itself_is_believed(server, policy):
    policy.begin(5, holds=False)
    told = [{"version": 4, "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]
    server.then(says([10, 11, EOS], version="5", weight_versions=told))
    assert (await generate(server, policy)).spans == [TokenSpan(4, 0, 1), TokenSpan(5, 1, 3)]


async def test_told_spans_are_relative_to_their_answer(server, policy):
    told = [{"version": 5, "start": 0, "end": 1}, {"version": 6, "start": 1, "end": 2}]
    server.then(
        says([10, 11], ABORTED, "4", first=begins(policy, 6)),
        says([12, EOS], version="6", weight_versions=told),
    )
    response = await goes_on(server, policy, calls=1, version=6)
    assert response.spans == [TokenSpan(4, 0, 2), TokenSpan(5, 2, 3), TokenSpan(6, 3, 4)]


def table(rows):
    """Routes of ``rows`` tokens, 2 layers, top-1."""
    return bytes(range(8 * rows))


def encoded(rows):
    return base64.b64encode(table(rows)).decode()


async def test_routes_are_those_of_the_last_answer(server, policy):
    server.then(
        says([10, 11], ABORTED, "4", first=begins(policy), routed_experts=encoded(4)),
        says([12, EOS], version="5", routed_experts=encoded(6)),
    )
    response = await goes_on(server, policy, calls=1, routed_experts=True)
    assert response.routed_experts == table(6)
    assert all(sent["return_routed_experts"] for sent in server.bodies)


async def test_an_aborted_segment_needs_no_routes(server, policy):
    server.then(
        says([10, 11], ABORTED, "4", first=begins(policy)),
        says([12, EOS], version="5", routed_experts=encoded(6)),
    )
    response = await goes_on(server, policy, calls=1, routed_experts=True)
    assert response.token_ids == [10, 11, 12, EOS]
    assert response.routed_experts == table(6)


@pytest.mark.parametrize("made", [[10, EOS], [10, 11, 12, 13, 14, 15]])
async def test_an_aborted_whole_answer_without_routes_is_sampled_again(server, policy, made):
    server.then(
        says(made, ABORTED, "4", first=begins(policy)),
        says([20, EOS], version="5", routed_experts=encoded(4)),
    )
    response = await goes_on(server, policy, calls=1, routed_experts=True)
    assert response.token_ids == [20, EOS]
    assert response.spans == [TokenSpan(5, 0, 2)]
    assert response.prefix_use == PrefixUse(input_tokens=3, cached_tokens=2)
    assert server.bodies[1]["input_ids"] == list(PROMPT)
    assert server.bodies[1]["sampling_params"]["max_new_tokens"] == BUDGET


FATAL = [
    ({}, says([10, 11], ABORTED), "finish_reason is abort: .*'Aborted'.*no publication began"),
    ({}, says([], ABORTED), "finish_reason is abort"),
    ({}, gated(), "Request [0-9a-f]{32} was aborted.*no publication began"),
    (
        {},
        replies((499, {"error": {"message": f"Request {'0' * 32} was aborted"}})),
        "status 499",
    ),
    ({}, replies((499, {"error": "gone"})), "status 499"),
    ({}, replies((500, b"Internal Server Error")), "status 500: Internal Server Error"),
    ({}, replies((200, b'{"text": "cut')), "body: "),
    ({}, says([]), "output_ids is empty"),
    ({}, says([10, 99]), r"output_ids holds a token outside \[0, 99\)"),
    ({}, says([10, -1]), "output_ids holds a token outside"),
    ({}, says([10, 11, 12, 13, 14, 15, 16]), "output_ids has 7 tokens, more than max_new_tokens"),
    ({}, says([10, EOS], output_token_logprobs=None), "output_token_logprobs is missing"),
    ({}, says([10, EOS], output_token_logprobs=[[-1, 10, None]]), "is 1 long for 2 output_ids"),
    ({}, says([10, EOS], output_token_logprobs=[[-1, 10, None], [-1, 9, None]]), "of token 9"),
    ({}, says([10], output_token_logprobs=[[float("nan"), 10, None]]), r"logprobs\[0\] is nan"),
    ({}, says([10], output_token_logprobs=[[None, 10, None]]), r"output_token_logprobs\.0\.0"),
    ({}, says([10, EOS], "exhausted"), "finish_reason.type is 'exhausted'"),
    ({}, says([10, EOS], version="default"), "weight_version: 'default' is no policy version"),
    ({}, says([10, EOS], version=True), "weight_version"),
    ({}, says([10, EOS], version="5"), "weight_version is '5', but the newest .* is 4"),
    ({"exact": 3}, says([10, EOS]), "weight_version is '4', expected 3"),
    ({}, says([10, EOS], weight_versions=[]), "weight_versions: spans: there is none"),
    ({}, says([10, EOS], weight_versions=7), "weight_versions"),
    (
        {},
        says([10, EOS], weight_versions=[{"version": 4, "start": 0, "end": 1}]),
        "weight_versions: spans end at 1, the response has 2 tokens",
    ),
    (
        {},
        says([10, EOS], weight_versions=[{"version": 3, "start": 0, "end": 2}]),
        "weight_versions: spans end at version 3, the last forward was of version 4",
    ),
    ({"routed_experts": True}, says([10, EOS]), "routed_experts is missing"),
    ({"routed_experts": True}, says([10, EOS], routed_experts="!"), "routed_experts is no base64"),
    (
        {"routed_experts": True},
        says([10, EOS], routed_experts=base64.b64encode(bytes(12)).decode()),
        "routed_experts has 12 bytes, no int32 table of 4 rows",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "script", "message"), FATAL)
async def test_garbage_is_fatal_and_named(server, policy, changes, script, message):
    server.then(script)
    with pytest.raises(ContractViolation, match=message) as caught:
        await generate(server, policy, **changes)
    assert "prompt group 3, sample 12" in str(caught.value)
    assert len(server.bodies) == 1


async def test_an_abort_that_no_pause_makes_is_fatal_during_a_publication(server, policy):
    refused = ABORTED | {"status_code": 400, "err_type": "BadRequestError"}
    server.then(says([10, 11], refused, first=begins(policy)))
    with pytest.raises(ContractViolation, match="BadRequestError"):
        await generate(server, policy)


async def test_versions_that_fall_are_fatal(server, policy):
    server.then(says([10, 11], ABORTED, "4", first=begins(policy)), says([12, EOS], version="3"))
    with pytest.raises(ContractViolation, match=r"sample 12: spans\[0\]\.version is 4, above .* 3"):
        await goes_on(server, policy, calls=1)


async def test_told_spans_of_another_version_than_the_exact_one_are_fatal(server, policy):
    told = [{"version": 3, "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 2}]
    server.then(says([10, EOS], weight_versions=told))
    with pytest.raises(ContractViolation, match="expected 4"):
        await generate(server, policy, exact=4)
