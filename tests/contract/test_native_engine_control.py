"""What only the native engine offers: refusals of what ends SGLang, checksums, metrics."""

import json
from pathlib import Path

import pytest
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.served_engine import ServedEngine


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_flush_while_requests_are_held_is_refused(engine: ServedEngine, mode: str) -> None:
    """It ends an SGLang server. The weights stay, and the pause answers health checks."""
    call = engine.long_call("held", max_new_tokens=900)
    await engine.until_load(running=1)
    await engine.http.post("/pause_generation", json={"mode": mode})
    assert (await engine.http.get("/health")).status_code == 200
    refused = await engine.update(engine.folders[1], "v1", flush_cache=True)
    assert refused.status_code == 400
    assert refused.json()["success"] is False
    assert (await engine.http.get("/model_info")).json()["weight_version"] == "default"
    taken = await engine.update(engine.folders[1], "v1", flush_cache=False)
    assert taken.json()["num_paused_requests"] == 1
    await engine.http.post("/continue_generation", json={})
    assert (await call).json()["meta_info"]["weight_version"] == "v1"


async def test_checksums_are_those_of_the_file_and_see_every_tensor(
    engine: ServedEngine, tmp_path: Path
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


async def test_information_and_metrics(engine: ServedEngine) -> None:
    info = (await engine.http.get("/model_info")).json()
    assert (await engine.http.get("/get_model_info")).json() == info
    server = (await engine.http.get("/server_info")).json()
    assert (server["max_req_input_len"], server["context_length"]) == (4095, 4096)
    await engine.http.post("/update_weight_version", json={"new_version": "17"})
    text = (await engine.http.get("/metrics")).text
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
