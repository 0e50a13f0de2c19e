"""Giving memory back and taking it again, by a real client of a real engine."""

import httpx
import pytest

from activities.wire.client import EngineClient
from activities.wire.memory_marks import RESUMED
from models.errors import ContractViolation
from tests.support.engine_model import PROMPT
from tests.support.served_engine import ServedEngine

TAGS = ("kv_cache", "weights")
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


async def version(engine: ServedEngine) -> str:
    return str((await engine.http.get("/model_info")).json()["weight_version"])


async def test_the_cycle_ends_with_the_loaded_weights(engine: ServedEngine) -> None:
    """Release, resume, load, continue: the answers are those of the folder that was loaded."""
    client = EngineClient(engine.url, vocab_size=engine.config["vocab_size"])
    try:
        await client.pause("abort")
        await client.update_weights_from_disk(str(engine.folders[1]), 1, 30.0)
        digest = await client.checksums()
        await client.resume()
        expected = (await engine.generate())["output_ids"]
        for number in (2, 3):
            await client.pause("abort")
            await client.release_memory(TAGS)
            assert await version(engine) == "released:kv_cache,weights"
            # Twice is once: a retry of whoever died in between.
            await client.release_memory(TAGS)
            for refused in (client.resume(), client.checksums()):
                with pytest.raises(ContractViolation):
                    await refused
            await client.resume_memory(TAGS)
            await client.resume_memory(TAGS)
            assert await version(engine) == RESUMED
            assert await client.checksums() != digest
            await client.update_weights_from_disk(str(engine.folders[1]), number, 30.0)
            assert await client.checksums() == digest
            await client.resume()
            assert (await engine.generate())["output_ids"] == expected
            assert await version(engine) == str(number)
    finally:
        await client.aclose()


async def test_a_request_at_the_gate_waits_through_the_whole_cycle(
    engine: ServedEngine,
) -> None:
    client = EngineClient(engine.url)
    try:
        await client.pause("abort")
        await client.release_memory(TAGS)
        held = engine.call(rid="held")
        await engine.until_gated(1)
        await client.resume_memory(TAGS)
        await client.update_weights_from_disk(str(engine.folders[1]), 1, 30.0)
        assert not held.done()
        await client.resume()
        meta = (await held).json()["meta_info"]
        assert (meta["weight_version"], meta["prompt_tokens"]) == ("1", len(PROMPT))
    finally:
        await client.aclose()


async def test_what_would_end_an_sglang_server_is_refused(engine: ServedEngine) -> None:
    post = engine.http.post

    async def refused(path: str, body: dict[str, object], reason: str) -> None:
        answer: httpx.Response = await post(path, json=body)
        assert answer.status_code == 400
        assert reason in answer.text

    await refused(RELEASE, {}, "a paused engine without requests")
    await refused(RELEASE, {"tags": ["graphs"]}, "a list of kv_cache, weights")
    running = engine.long_call("a" * 32)
    await engine.until_load(running=1)
    await post("/pause_generation", json={"mode": "retract"})
    await refused(RELEASE, {}, "it has 1")
    await post("/pause_generation", json={"mode": "abort"})
    assert (await running).json()["meta_info"]["finish_reason"]["type"] == "abort"
    await refused(RESUME, {"tags": ["weights"]}, "weights is not released")
    assert (await post(RELEASE, json={"tags": ["weights"]})).status_code == 200
    await refused(RELEASE, {}, "weights is released already")
    await refused("/weights_checker", {"action": "checksum"}, "resume it first")
    await refused("/continue_generation", {}, "resume it first")
    folder = str(engine.folders[0])
    await refused("/update_weights_from_disk", {"model_path": folder}, "resume it first")
    assert (await post(RESUME, json={"tags": ["weights"]})).status_code == 200
    loaded = {"model_path": folder, "weight_version": "7"}
    assert (await post("/update_weights_from_disk", json=loaded)).status_code == 200
    assert (await post("/continue_generation", json={})).status_code == 200
    assert (await engine.generate())["meta_info"]["weight_version"] == "7"
