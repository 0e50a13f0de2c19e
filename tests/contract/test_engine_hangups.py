"""New weights while an engine still computes for clients that are gone."""

import asyncio

import httpx

from activities.wire.client import EngineClient
from tests.support.served_engine import DEADLINE_S, ServedEngine


async def test_an_update_right_after_clients_hung_up(any_engine: ServedEngine) -> None:
    """SGLang 0.5.18 ended with all its processes: its pause does not wait for such requests."""
    async with httpx.AsyncClient(base_url=any_engine.url, timeout=DEADLINE_S) as gone:
        begun = [asyncio.Event() for _ in range(4)]
        calls = [
            asyncio.create_task(_stream(gone, any_engine, f"gone{number}", event))
            for number, event in enumerate(begun)
        ]
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(event.wait() for event in begun))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    client = EngineClient(any_engine.url)
    try:
        await client.pause("abort")
        await client.update_weights_from_disk(str(any_engine.folders[1]), 9, DEADLINE_S)
        assert (await client.model_info())["weight_version"] == "9"
        await client.resume()
        assert await client.alive()
    finally:
        await client.aclose()
    answer = await any_engine.generate(rid="0" * 32)
    assert answer["meta_info"]["weight_version"] == "9"


async def _stream(
    client: httpx.AsyncClient, engine: ServedEngine, rid: str, begun: asyncio.Event
) -> None:
    """A long response; the native engine answers as a whole, so that its arrival has to do."""
    if engine.is_native:
        begun.set()
    body = engine.body(4000, rid=rid, stream=not engine.is_native)
    async with client.stream("POST", "/generate", json=body) as answer:
        async for _ in answer.aiter_lines():
            begun.set()
