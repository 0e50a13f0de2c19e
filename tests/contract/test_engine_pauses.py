"""Pause, update from disk, continue, flush and versions of every engine."""

import asyncio

import httpx
import pytest

from tests.support.served_engine import ServedEngine

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}


def updated(version: str) -> str:
    return f"Succeeded to update model weights. Weight version updated to {version}."


def check_gated(engine: ServedEngine, answer: httpx.Response) -> None:
    """An abort at the gate: told when it opens; SGLang 0.5.18 forgets it and answers as usual."""
    if engine.is_native or answer.status_code != 200:
        assert answer.status_code == 499
        assert answer.json() == {"error": {"message": "Request gated was aborted"}}
    else:
        assert answer.json()["meta_info"]["weight_version"] == "v1"


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_pause_update_continue(any_engine: ServedEngine, mode: str) -> None:
    """What runs ends (abort) or is held; what comes is held; both go on under the new weights."""
    before = await any_engine.generate()
    call = any_engine.long_call("held", max_new_tokens=900)
    await any_engine.until_load(running=1)
    paused = await any_engine.http.post("/pause_generation", json={"mode": mode})
    assert (paused.status_code, paused.json()) == (200, PAUSED)
    late = any_engine.call(rid="late")
    gated = any_engine.call(rid="gated")
    await any_engine.until_gated(2)
    await any_engine.http.post("/abort_request", json={"rid": "gated"})
    # A flush while requests are held ends an SGLang server.
    first = await any_engine.update(any_engine.folders[1], "v1", flush_cache=mode == "abort")
    assert first.status_code == 200, first.text
    assert (first.json()["success"], first.json()["message"]) == (True, updated("v1"))
    assert not late.done()
    assert not gated.done()
    resumed = await any_engine.http.post("/continue_generation", json={})
    assert (resumed.status_code, resumed.json()) == (200, CONTINUED)
    check_gated(any_engine, await gated)
    answer = (await late).json()
    assert answer["meta_info"]["weight_version"] == "v1"
    assert answer["output_ids"] != before["output_ids"]
    meta = (await call).json()["meta_info"]
    if mode == "abort":
        assert meta["finish_reason"] == ABORTED
        assert meta["weight_version"] == "default"
    else:
        assert meta["finish_reason"] == {"type": "length", "length": 900}
        assert (meta["weight_version"], meta["num_retractions"]) == ("v1", int(mode == "retract"))
    info = (await any_engine.http.get("/model_info")).json()
    assert (info["weight_version"], info["model_path"]) == ("v1", str(any_engine.folders[1]))
    again = await any_engine.http.post("/continue_generation", json={})
    assert (again.status_code, again.json()) == (200, CONTINUED)


async def test_a_pause_that_aborts_answers_queued_requests_without_tokens(
    any_engine: ServedEngine,
) -> None:
    """Four run, four wait; a client continues all eight under the next weights."""
    running = [any_engine.long_call(f"run{number}") for number in range(4)]
    await any_engine.until_load(running=4)
    queued = [any_engine.long_call(f"que{number}", return_logprob=False) for number in range(4)]
    await any_engine.until_load(running=4, waiting=4)
    paused = await any_engine.http.post("/pause_generation", json={"mode": "abort"})
    assert paused.status_code == 200
    partial = [(await call).json() for call in running]
    for body in partial:
        assert body["meta_info"]["finish_reason"] == ABORTED
        assert body["meta_info"]["weight_version"] == "default"
        logged = [entry[1] for entry in body["meta_info"]["output_token_logprobs"]]
        assert logged == body["output_ids"] != []
    for call in queued:
        answer = await call
        meta = answer.json()["meta_info"]
        assert (answer.status_code, answer.json()["output_ids"]) == (200, [])
        assert meta["finish_reason"] == IN_QUEUE
        assert meta["weight_version"] == "default"
        assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & set(meta)
    assert (await any_engine.update(any_engine.folders[1], "v1")).status_code == 200
    context = any_engine.body()["input_ids"] + partial[0]["output_ids"]
    again = any_engine.call(rid="again", input_ids=context)
    await any_engine.until_gated(1)
    await any_engine.http.post("/continue_generation", json={})
    meta = (await again).json()["meta_info"]
    assert (meta["weight_version"], meta["prompt_tokens"]) == ("v1", len(context))
    assert meta["cached_tokens"] == 0, "the prefix was computed under the old weights"


async def test_an_idle_pause_takes_an_update_with_a_flush(any_engine: ServedEngine) -> None:
    before = await any_engine.generate()
    assert (await any_engine.http.post("/pause_generation", json={})).json() == PAUSED
    flushed = await any_engine.http.post("/flush_cache")
    assert flushed.status_code == 200
    answer = await any_engine.update(any_engine.folders[1], "v1", flush_cache=True)
    assert (answer.status_code, answer.json()["message"]) == (200, updated("v1"))
    renamed = await any_engine.http.post("/update_weight_version", json={"new_version": "v2"})
    assert renamed.status_code == 200
    await any_engine.http.post("/continue_generation", json={})
    after = await any_engine.generate()
    assert after["meta_info"]["weight_version"] == "v2"
    assert after["output_ids"] != before["output_ids"]


async def test_an_update_waits_for_running_requests_and_swaps_outputs(
    any_engine: ServedEngine,
) -> None:
    v0 = await any_engine.generate(return_logprob=True)
    call = any_engine.long_call("running", max_new_tokens=300)
    await any_engine.until_load(running=1)
    assert (await any_engine.update(any_engine.folders[1], "busy")).status_code == 200
    assert (await call).json()["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
    v1 = await any_engine.generate(return_logprob=True)
    assert v1["output_ids"] != v0["output_ids"]
    assert (await any_engine.update(any_engine.folders[0], "v0")).status_code == 200
    back = await any_engine.generate(return_logprob=True)
    assert back["output_ids"] == v0["output_ids"]
    told = [
        [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        for answer in (back, v0)
    ]
    assert told[0] == pytest.approx(told[1], abs=any_engine.tolerance)


async def test_a_folder_that_is_none_leaves_the_weights(any_engine: ServedEngine) -> None:
    before = await any_engine.generate()
    nowhere = await any_engine.http.post(
        "/update_weights_from_disk", json={"model_path": "/nowhere"}
    )
    assert nowhere.status_code == 400
    assert list(nowhere.json()) == ["success", "message", "num_paused_requests"]
    assert nowhere.json()["success"] is False
    assert nowhere.json()["message"].startswith("Failed to get weights iterator: ")
    after = await any_engine.generate()
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "default"


async def test_a_version_can_be_renamed(any_engine: ServedEngine) -> None:
    renamed = await any_engine.http.post("/update_weight_version", json={"new_version": "hand"})
    assert renamed.json() == {
        "success": True, "message": "Weight version updated to hand", "new_version": "hand",
    }  # fmt: skip
    assert (await any_engine.generate())["meta_info"]["weight_version"] == "hand"
    assert (await any_engine.http.get("/model_info")).json()["weight_version"] == "hand"


async def test_flush_cache(any_engine: ServedEngine) -> None:
    idle = await any_engine.http.post("/flush_cache")
    assert (idle.status_code, idle.text.split("\n")[0]) == (200, "Cache flushed.")
    assert (await any_engine.generate())["meta_info"]["cached_tokens"] == 0
    call = any_engine.long_call("runs")
    await any_engine.until_load(running=1)
    busy = await any_engine.http.post("/flush_cache")
    assert (busy.status_code, busy.text) == (400, "Flush cache failed.\n")
    timed = await any_engine.http.get("/flush_cache?timeout=0.05")
    assert (timed.status_code, timed.text.strip()) == (400, "Timed out waiting for idle state.")
    await any_engine.http.post("/abort_request", json={"abort_all": True})
    await call


async def test_an_engine_tells_of_itself_also_while_it_is_paused(any_engine: ServedEngine) -> None:
    await any_engine.http.post("/pause_generation", json={"mode": "abort"})
    waiting = any_engine.call(rid="waits")
    await any_engine.until_gated(1)
    async with asyncio.timeout(5):
        for path in ("/server_info", "/model_info", "/v1/loads", "/ping"):
            assert (await any_engine.http.get(path)).status_code == 200, path
    assert not waiting.done()
    await any_engine.http.post("/continue_generation", json={})
    assert (await waiting).status_code == 200
    for path in ("/health", "/health_generate"):
        health = await any_engine.http.get(path)
        assert (health.status_code, health.content) == (200, b"")


async def test_what_an_engine_tells_of_itself(any_engine: ServedEngine) -> None:
    info = (await any_engine.http.get("/model_info")).json()
    assert info["model_type"] == "qwen3_moe"
    assert info["architectures"] == ["Qwen3MoeForCausalLM"]
    assert info["model_path"] == str(any_engine.folders[0])
    assert info["is_generation"] is True
    server = (await any_engine.http.get("/server_info")).json()
    told = {key: server[key] for key in ("max_running_requests", "max_queued_requests")}
    assert told == {
        "max_running_requests": 4, "max_queued_requests": any_engine.max_queued,
    }  # fmt: skip
    assert server["enable_return_routed_experts"] is True
    assert 0 < server["max_req_input_len"] < 4096
    assert server["version"]
    load = await any_engine.load()
    assert {"num_running_reqs", "num_waiting_reqs", "num_used_tokens", "token_usage"} <= set(load)
    metrics = (await any_engine.http.get("/metrics")).text
    assert "# TYPE sglang:num_running_reqs gauge" in metrics
