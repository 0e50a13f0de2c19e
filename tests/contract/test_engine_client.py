"""The project's own client against every engine: what it makes of answers and refusals."""

import asyncio
import math
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from activities.wire.client import EngineClient
from activities.wire.contract import GenerateRequest, SamplingParams
from activities.wire.faults import OVERLOAD, TIMEOUT, TRANSPORT
from models.errors import ContractViolation, GenerationFault, RequestGated, ServiceUnreachable
from tests.support.engine_model import PROMPT
from tests.support.served_engine import ServedEngine

TIMEOUT_S = 50.0
CONTEXT = 4090


@pytest.fixture
async def client(any_engine: ServedEngine) -> AsyncIterator[EngineClient]:
    vocab_size = any_engine.config["vocab_size"]
    made = EngineClient(any_engine.url, vocab_size=vocab_size, context_length=CONTEXT)
    yield made
    await made.aclose()


def asked(length: int = 4, prompt: list[int] | None = None, **told: object) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=length, ignore_eos=True, temperature=0)
    return GenerateRequest(
        rid=uuid4().hex, input_ids=prompt or PROMPT, sampling_params=sampling, **told
    )


async def test_an_answer_is_read(client: EngineClient) -> None:
    request = asked(return_routed_experts=True)
    answer = await client.generate(request, timeout_s=TIMEOUT_S)
    meta = answer.meta_info
    assert (meta.id, meta.weight_version) == (request.rid, "default")
    assert meta.finish_reason == {"type": "length", "length": 4}
    assert meta.output_token_logprobs is not None
    assert [token for _, token, _ in meta.output_token_logprobs] == answer.output_ids
    assert all(math.isfinite(logprob) for logprob, _, _ in meta.output_token_logprobs)
    assert meta.routed_experts is not None


@pytest.mark.parametrize("prompt_length", [CONTEXT - 10, CONTEXT - 1])
async def test_prompt_and_response_may_fill_the_context(
    client: EngineClient, prompt_length: int
) -> None:
    request = asked(CONTEXT - prompt_length, [5 + number % 40 for number in range(prompt_length)])
    answer = await client.generate(request, timeout_s=TIMEOUT_S)
    assert len(answer.output_ids) == CONTEXT - prompt_length


async def test_a_full_queue_is_a_fault_of_overload(
    client: EngineClient, any_engine: ServedEngine
) -> None:
    running = [any_engine.long_call(f"run{number}") for number in range(4)]
    await any_engine.until_load(running=4)
    queued = [any_engine.long_call(f"que{number}") for number in range(any_engine.max_queued)]
    await any_engine.until_load(running=4, waiting=any_engine.max_queued)
    with pytest.raises(GenerationFault) as caught:
        await client.generate(asked(), timeout_s=TIMEOUT_S)
    assert caught.value.category == OVERLOAD
    await client.abort_all()
    await asyncio.gather(*running, *queued)


async def test_no_answer_in_time_is_a_fault_of_time(
    client: EngineClient, any_engine: ServedEngine
) -> None:
    with pytest.raises(GenerationFault) as caught:
        await client.generate(asked(3000), timeout_s=0.5)
    assert caught.value.category == TIMEOUT
    await any_engine.until_load(running=0)


async def test_nobody_at_the_address_is_a_fault_of_transport(unused_tcp_port: int) -> None:
    client = EngineClient(f"http://127.0.0.1:{unused_tcp_port}", vocab_size=9, context_length=9)
    with pytest.raises(GenerationFault) as caught:
        await client.generate(asked(1, [1]), timeout_s=TIMEOUT_S)
    assert caught.value.category == TRANSPORT
    with pytest.raises(ServiceUnreachable):
        await client.model_info()
    assert not await client.health()
    await client.aclose()


async def test_a_refused_request_ends_the_run(any_engine: ServedEngine) -> None:
    """A client that was told of a longer context than the engine has."""
    client = EngineClient(any_engine.url, vocab_size=320, context_length=10_000)
    with pytest.raises(ContractViolation, match=r"status 400.*longer than the model's context"):
        await client.generate(asked(1, [5] * 9000), timeout_s=TIMEOUT_S)
    await client.aclose()


async def test_a_publication_in_a_pause(client: EngineClient, any_engine: ServedEngine) -> None:
    first = await client.generate(asked(), timeout_s=TIMEOUT_S)
    running = asyncio.create_task(client.generate(asked(3000), timeout_s=TIMEOUT_S))
    await any_engine.until_load(running=1)
    await client.pause("abort")
    partial = await running
    assert partial.meta_info.finish_reason["type"] == "abort"
    assert 0 < len(partial.output_ids) < 3000
    assert await client.alive()
    gated = asyncio.create_task(client.generate(asked(), timeout_s=TIMEOUT_S))
    await any_engine.until_gated(1)
    await client.update_weights_from_disk(str(any_engine.folders[1]), 7, TIMEOUT_S)
    assert (await client.model_info())["weight_version"] == "7"
    assert not gated.done()
    await client.resume()
    answer = await gated
    assert answer.meta_info.weight_version == "7"
    assert answer.output_ids != first.output_ids
    assert await client.health()
    await client.flush_cache()
    await client.set_weight_version(8)
    assert (await client.model_info())["weight_version"] == "8"


async def test_an_abort_at_the_gate_is_told_or_forgotten(
    client: EngineClient, any_engine: ServedEngine
) -> None:
    """SGLang 0.5.17 and the native engine tell it when the gate opens, SGLang 0.5.18 forgets it."""
    await client.pause("abort")
    request = asked()
    gated = asyncio.create_task(client.generate(request, timeout_s=TIMEOUT_S))
    await any_engine.until_gated(1)
    await client.abort(request.rid)
    await client.resume()
    (outcome,) = await asyncio.gather(gated, return_exceptions=True)
    if any_engine.is_native or isinstance(outcome, BaseException):
        assert isinstance(outcome, RequestGated)
    else:
        assert outcome.meta_info.finish_reason == {"type": "length", "length": 4}


async def test_a_folder_that_is_none_is_refused(client: EngineClient) -> None:
    await client.pause("abort")
    with pytest.raises(ContractViolation, match="Failed to get weights iterator"):
        await client.update_weights_from_disk("/nowhere", 3, TIMEOUT_S)
    assert (await client.model_info())["weight_version"] == "default"
    await client.resume()
