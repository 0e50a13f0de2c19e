"""Pause, update, continue, flush, checksums and metrics of the real process."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_pause_update_continue(engine: Any, mode: str) -> None:
    before = await engine.generate()
    call = engine.long_call("held", max_new_tokens=900)
    await engine.until_load(running=1)
    paused = await engine.http.post("/pause_generation", json={"mode": mode})
    assert (paused.status_code, paused.json()) == (
        200, {"message": "Generation paused successfully.", "status": "ok"},
    )  # fmt: skip
    late = asyncio.create_task(engine.http.post("/generate", json=engine.body(rid="late")))
    gated = asyncio.create_task(engine.http.post("/generate", json=engine.body(rid="gated")))
    while (await engine.http.get("/server_info")).json()["num_gated_requests"] < 2:
        await asyncio.sleep(0.01)
    assert (await engine.http.get("/health")).status_code == 200
    await engine.http.post("/abort_request", json={"rid": "gated"})
    update = {"model_path": str(engine.folders[1]), "weight_version": "v1", "flush_cache": True}
    first = await engine.http.post("/update_weights_from_disk", json=update)
    held = 0 if mode == "abort" else 1
    if held:
        # SGLang's process ends here; this engine refuses.
        assert first.status_code == 400
        assert first.json()["success"] is False
        assert (await engine.http.get("/model_info")).json()["weight_version"] == "default"
        update["flush_cache"] = False
        first = await engine.http.post("/update_weights_from_disk", json=update)
    assert (first.status_code, first.json()) == (
        200,
        {
            "success": True,
            "message": "Succeeded to update model weights. Weight version updated to v1.",
            "num_paused_requests": held,
        },
    )
    assert not late.done()
    assert not gated.done()
    resumed = await engine.http.post("/continue_generation")
    assert resumed.json() == {"message": "Generation continued successfully.", "status": "ok"}
    assert (await gated).status_code == 499
    assert (await gated).json() == {"error": {"message": "Request gated was aborted"}}
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
    info = (await engine.http.get("/model_info")).json()
    assert (info["weight_version"], info["model_path"]) == ("v1", str(engine.folders[1]))


async def test_a_pause_that_aborts_answers_queued_requests_without_tokens(engine: Any) -> None:
    """Four run, four wait; a client continues all eight under the next weights."""
    running = [engine.long_call(f"run{number}") for number in range(4)]
    await engine.until_load(running=4)
    queued = [engine.long_call(f"que{number}", return_logprob=False) for number in range(4)]
    await engine.until_load(running=4, waiting=4)
    assert (await engine.http.post("/pause_generation", json={"mode": "abort"})).status_code == 200
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
        assert meta["finish_reason"] == ABORTED | {"message": "Abort in waiting queue"}
        assert meta["weight_version"] == "default"
        assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & set(meta)
    update = {"model_path": str(engine.folders[1]), "weight_version": "v1", "flush_cache": True}
    assert (await engine.http.post("/update_weights_from_disk", json=update)).status_code == 200
    context = engine.body()["input_ids"] + partial[0]["output_ids"]
    again = asyncio.create_task(
        engine.http.post("/generate", json=engine.body(rid="again") | {"input_ids": context})
    )
    while (await engine.http.get("/server_info")).json()["num_gated_requests"] < 1:
        await asyncio.sleep(0.01)
    await engine.http.post("/continue_generation")
    meta = (await again).json()["meta_info"]
    assert (meta["weight_version"], meta["prompt_tokens"]) == ("v1", len(context))


async def test_update_waits_for_running_requests_and_swaps_outputs(engine: Any) -> None:
    v0 = await engine.generate(return_logprob=True)
    call = engine.long_call("running", max_new_tokens=300)
    await engine.until_load(running=1)
    update = {"model_path": str(engine.folders[1]), "weight_version": "busy"}
    assert (await engine.http.post("/update_weights_from_disk", json=update)).status_code == 200
    assert call.done() or (await call).json()["meta_info"]["weight_version"] == "default"
    v1 = await engine.generate(return_logprob=True)
    assert v1["output_ids"] != v0["output_ids"]
    update = {"model_path": str(engine.folders[0]), "weight_version": "v0"}
    assert (await engine.http.post("/update_weights_from_disk", json=update)).status_code == 200
    back = await engine.generate(return_logprob=True)
    assert back["output_ids"] == v0["output_ids"]
    same = [answer["meta_info"]["output_token_logprobs"] for answer in (back, v0)]
    assert same[0] == same[1]
    nowhere = await engine.http.post("/update_weights_from_disk", json={"model_path": "/nowhere"})
    assert nowhere.status_code == 400
    assert list(nowhere.json()) == ["success", "message", "num_paused_requests"]
    assert nowhere.json()["message"].startswith("Failed to get weights iterator: ")
    assert (await engine.generate())["output_ids"] == v0["output_ids"]
    renamed = await engine.http.post("/update_weight_version", json={"new_version": "hand"})
    assert renamed.json() == {
        "success": True, "message": "Weight version updated to hand", "new_version": "hand",
    }  # fmt: skip
    assert (await engine.generate())["meta_info"]["weight_version"] == "hand"


async def test_flush_cache(engine: Any) -> None:
    idle = await engine.http.post("/flush_cache")
    assert (idle.status_code, idle.text.split("\n")[0]) == (200, "Cache flushed.")
    call = engine.long_call("runs")
    await engine.until_load(running=1)
    busy = await engine.http.post("/flush_cache")
    assert (busy.status_code, busy.text) == (400, "Flush cache failed.\n")
    timed = await engine.http.get("/flush_cache?timeout=0.05")
    assert (timed.status_code, timed.text.strip()) == (400, "Timed out waiting for idle state.")
    await engine.http.post("/abort_request", json={"abort_all": True})
    await call


async def test_checksums_are_those_of_the_file_and_see_every_tensor(
    engine: Any, tmp_path: Path
) -> None:
    served = await engine.checksums()
    with safe_open(str(engine.folders[0] / "model.safetensors"), framework="np") as opened:
        expected = {
            name: xxhash.xxh3_64_hexdigest(opened.get_tensor(name).tobytes())
            for name in opened.keys()  # noqa: SIM118
        }
    assert served == expected
    tensors = load_file(engine.folders[0] / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(engine.config))
    names = sorted(tensors)[:: max(len(tensors) // 12, 1)][:12]
    assert len(names) == 12
    for name in names:
        changed = dict(tensors)
        changed[name] = tensors[name].clone()
        changed[name].view(-1)[-1] += 1e-3
        save_file(changed, tmp_path / "model.safetensors")
        update = {"model_path": str(tmp_path), "weight_version": name}
        assert (await engine.http.post("/update_weights_from_disk", json=update)).status_code == 200
        now = await engine.checksums()
        assert {key for key in now if now[key] != served[key]} == {name}


async def test_information_and_metrics(engine: Any) -> None:
    info = (await engine.http.get("/model_info")).json()
    assert info["model_type"] == "qwen3_moe"
    assert info["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (await engine.http.get("/get_model_info")).json() == info
    server = (await engine.http.get("/server_info")).json()
    assert (server["max_req_input_len"], server["context_length"]) == (4095, 4096)
    assert (await engine.http.get("/ping")).status_code == 200
    health = await engine.http.get("/health_generate")
    assert (health.status_code, health.content) == (200, b"")
    await engine.http.post("/update_weight_version", json={"new_version": "17"})
    text = (await engine.http.get("/metrics")).text
    assert "# TYPE sglang:num_running_reqs gauge" in text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['perdure_policy_version{model_name="v0"}'] == "17"
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage"):
        assert float(values[f'sglang:{name}{{model_name="v0"}}']) == 0
    for name in ("gen_throughput", "cache_hit_rate"):
        assert float(values[f'sglang:{name}{{model_name="v0"}}']) >= 0
    assert int(values['sglang:generation_tokens_total{model_name="v0"}']) > 0
    # one prompt is computed, the three others copy all of its tokens but the last
    siblings = {"n": 4, "temperature": 1}
    await engine.generate(rid="s" * 32, sampling_params=siblings)
    load = (await engine.http.get("/v1/loads")).json()["loads"][0]
    assert load["cache_hit_rate"] == pytest.approx(3 * 11 / (4 * 12))
