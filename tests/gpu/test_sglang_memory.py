"""A colocated SGLang engine gives its GPU memory back and serves what is loaded afterwards."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from activities.wire.client import EngineClient
from activities.wire.memory_marks import RESUMED
from models.errors import ContractViolation
from tests.support.engine_model import CONFIG, GPU_SIZES, PROMPT, write_engine_model
from tests.support.sglang_server import NO_SGLANG, sees_gpu, sglang_python, sglang_server

PYTHON = sglang_python()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(PYTHON is None, reason=NO_SGLANG),
]
TAGS = ("kv_cache", "weights")
MIB = 1 << 20
BATCH = 128


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return (
        write_engine_model(root / "v0", 0, **GPU_SIZES),
        write_engine_model(root / "v1", 1, **GPU_SIZES),
    )


@pytest.fixture(scope="module")
def url(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not sees_gpu(PYTHON):
        pytest.skip(f"torch of {PYTHON}, which has SGLang, sees no GPU")
    more = {"max_running_requests": BATCH, "max_queued_requests": BATCH}
    with sglang_server(folders[0], tmp_path_factory.mktemp("server"), "colocated", more) as url:
        yield url


def free_bytes() -> int:
    """Of the GPU, as this process sees it."""
    return int(torch.cuda.mem_get_info()[0])


async def greedy(url: str) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        body = {"input_ids": PROMPT, "sampling_params": sampling}
        answer = await http.post(f"{url}/generate", json=body)
        return list(answer.raise_for_status().json()["output_ids"])


async def test_memory_is_the_trainers_until_the_next_weights(
    url: str, folders: tuple[Path, Path]
) -> None:
    client = EngineClient(url, vocab_size=CONFIG["vocab_size"])
    try:
        await client.pause("abort")
        await client.update_weights_from_disk(str(folders[1]), 1, 60.0)
        await client.resume()
        expected = await greedy(url)
        for version in (2, 3):
            await client.pause("abort")
            held = free_bytes()
            started = time.monotonic()
            await client.release_memory(TAGS)
            released_s = time.monotonic() - started
            # 0.2 of the GPU is the engine's; nearly all of it is keys and values here.
            freed = free_bytes() - held
            assert freed > 1024 * MIB
            await client.release_memory(TAGS)
            assert (await client.server_info())["enable_memory_saver"] is True
            with pytest.raises(ContractViolation):
                await client.resume()
            started = time.monotonic()
            await client.resume_memory(TAGS)
            resumed_s = time.monotonic() - started
            assert (await client.model_info())["weight_version"] == RESUMED
            await client.update_weights_from_disk(str(folders[1]), version, 60.0)
            await client.resume()
            assert await greedy(url) == expected
            print(f"{freed / MIB:.0f} MiB: release {released_s:.3f} s, resume {resumed_s:.3f} s")
    finally:
        await client.aclose()


async def test_memory_is_given_back_right_after_the_last_answers(
    url: str, folders: tuple[Path, Path]
) -> None:
    """Whatever of their last batch is still being computed: the server lives on."""
    client = EngineClient(url, vocab_size=CONFIG["vocab_size"])
    sampling = {"temperature": 1, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": [PROMPT] * BATCH, "sampling_params": sampling}
    try:
        async with asyncio.timeout(200), httpx.AsyncClient(trust_env=False, timeout=60) as http:
            for version in range(10, 40):
                answers = (await http.post(f"{url}/generate", json=body)).raise_for_status().json()
                assert [len(each["output_ids"]) for each in answers] == [8] * BATCH
                await client.pause("abort")
                await client.release_memory(TAGS)
                await client.resume_memory(TAGS)
                await client.update_weights_from_disk(str(folders[1]), version, 60.0)
                await client.resume()
    finally:
        await client.aclose()
