"""What only a real SGLang server does: its health in a pause, its time limits, its end."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from uuid import uuid4

import httpx
import pytest

from activities.wire.client import EngineClient
from activities.wire.contract import GenerateRequest, SamplingParams
from activities.wire.faults import TIMEOUT, TRANSPORT
from models.errors import GenerationFault
from tests.support.engine_model import GPU_SIZES, PROMPT, write_engine_model
from tests.support.served_engine import ServedEngine
from tests.support.sglang_server import NO_SGLANG, sees_gpu, sglang_python, sglang_server

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300)]

WAITING_LIMIT_S, RUNNING_LIMIT_S = 1.0, 6.0
HEALTH_LIMIT_S = 30.0
"""The server itself gives up after 20."""


async def test_a_pause_fails_health_and_not_liveness(sglang_engine: ServedEngine) -> None:
    async with AsyncExitStack() as stack:
        client = EngineClient(sglang_engine.url)
        stack.push_async_callback(client.aclose)
        assert await client.health()
        await client.pause("abort")
        assert not await client.health(timeout_s=HEALTH_LIMIT_S)
        assert await client.alive()
        await client.resume()
        assert await client.health()


@pytest.fixture(scope="module")
def limited_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of its own, with time limits that a run never sets."""
    python = sglang_python()
    if python is None:
        pytest.skip(NO_SGLANG)
    root = tmp_path_factory.mktemp("limited")
    model = write_engine_model(root / "v0", 0, **(GPU_SIZES if sees_gpu(python) else {}))
    limits = {
        "SGLANG_REQ_WAITING_TIMEOUT": str(WAITING_LIMIT_S),
        "SGLANG_REQ_RUNNING_TIMEOUT": str(RUNNING_LIMIT_S),
    }
    with sglang_server(model, root, **limits) as url:
        yield url


@pytest.fixture
async def limited(limited_url: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(limited_url, vocab_size=320, context_length=4090)
    yield client
    await client.aclose()


def long_request() -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=4000, ignore_eos=True)
    return GenerateRequest(rid=uuid4().hex, input_ids=PROMPT, sampling_params=sampling)


async def outcomes(calls: list["asyncio.Task[object]"]) -> list[GenerationFault]:
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, GenerationFault) for each in done), done
    return [each for each in done if isinstance(each, GenerationFault)]


async def test_waiting_and_running_too_long_are_faults_of_time(
    limited: EngineClient, limited_url: str
) -> None:
    """Four run and one waits. The answers are two different ones, and both without tokens."""
    calls = [asyncio.create_task(limited.generate(long_request(), timeout_s=60)) for _ in range(5)]
    faults = await outcomes(calls)
    assert {fault.category for fault in faults} == {TIMEOUT}
    told = sorted(fault.message.split('"message":"')[1].split('"')[0] for fault in faults)
    assert told == [*["Request running timeout reached."] * 4, "Request waiting timeout reached."]


async def test_a_token_outside_the_vocabulary_ends_the_server(
    limited: EngineClient, limited_url: str
) -> None:
    """The last test here: nothing of the server is left. A client refuses to send such a token."""
    call = asyncio.create_task(limited.generate(long_request(), timeout_s=60))
    async with httpx.AsyncClient(base_url=limited_url, timeout=60, trust_env=False) as http:
        while not (await http.get("/v1/loads")).json()["loads"][0]["num_running_reqs"]:
            await asyncio.sleep(0.05)
        with pytest.raises(httpx.TransportError):
            await http.post("/generate", json={"input_ids": [5, 100_000_000]})
    (fault,) = await outcomes([call])
    assert fault.category == TRANSPORT
