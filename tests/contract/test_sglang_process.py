"""A real SGLang server as the engine actor runs it: it serves, ends, and leaves nothing."""

import asyncio
import os
import signal
import tomllib
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from configs.load import resolve_document
from configs.run import RunSpec
from models.ids import RunRef
from tests.support.engine_model import GPU_SIZES, PROMPT, write_engine_model
from tests.support.sglang_server import sees_gpu, sglang_python
from workers.actors.engine import server_command
from workers.actors.order import ActorOrder
from workers.engines.process import ServerProcess

START_S = 240.0
SOON_S = 15.0
RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "tiny.toml"
ON_GPU: dict[str, Any] = {
    "dtype": "bfloat16",
    "sglang": {
        "mem_fraction_static": 0.2,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "disable_prefill_cuda_graph": True,
    },
}

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(START_S + 60),
    pytest.mark.skipif(sglang_python() is None, reason="no interpreter has SGLang"),
]


def run_spec(root: Path, on_gpu: bool) -> RunSpec:
    document = tomllib.loads(RECIPE.read_text())
    document["inference"] |= {"engine": "sglang", "max_running_requests": 8, "kv_cache_mib": 16}
    document["inference"] |= {"server_concurrency": 8} | (ON_GPU if on_gpu else {})
    document["core"]["max_context_length"] = 512
    document["trainer"]["micro_batch_tokens"] = 4096
    document["placement"] = {"mode": "disaggregated" if on_gpu else "cpu"}
    document["output"]["root"] = str(root)
    return resolve_document(document, origin="tiny.toml").spec


async def start(folder: Path) -> ServerProcess:
    python = sglang_python()
    assert python is not None
    on_gpu = sees_gpu(python)
    model = write_engine_model(folder / "model", 0, **(GPU_SIZES if on_gpu else {}))
    run = RunRef(run_id="train/x", root=str(folder), spec_sha256="s")
    gpus = ("0",) if on_gpu else ()
    order = ActorOrder(run=run, role="engine", scratch=str(folder / "scratch"), gpus=gpus)
    return await ServerProcess.start(
        server_command(order, run_spec(folder, on_gpu), model, version=3), START_S
    )


def body(max_new_tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}


@pytest.mark.parametrize("ending", ["stop", "sglang::detokenizer", "sglang::scheduler"])
async def test_a_server_and_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setenv("PERDURE_SGLANG_PYTHON", str(sglang_python()))
    server = await start(tmp_path)
    everything = psutil.Process(server.pid).children(recursive=True)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
        assert (await client.get("/model_info")).json()["weight_version"] == "3"
        answer = (await client.post("/generate", json=body(5))).json()
        assert len(answer["output_ids"]) == 5
        assert len(answer["meta_info"]["output_token_logprobs"]) == 5

        call = asyncio.create_task(client.post("/generate", json=body(480)))
        async with asyncio.timeout(SOON_S):
            while not (await client.get("/v1/loads")).json()["loads"][0]["num_running_reqs"]:
                await asyncio.sleep(0.01)
            if ending == "stop":
                assert (await server.stop(grace_s=SOON_S)).returncode == 0
            else:
                os.kill(part(everything, ending).pid, signal.SIGKILL)
                assert (await server.wait_exit()).returncode == 1
        with pytest.raises(httpx.TransportError):
            await call
    assert not [process for process in everything if process.is_running()]


def part(processes: list[psutil.Process], title: str) -> psutil.Process:
    """The process of that title."""
    return next(each for each in processes if each.cmdline()[0].startswith(title))
