"""A served native engine for the contract tests: a real process on a tiny random model."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from workers.engines.native.model_shape import read_model_shape
from workers.engines.native.weights import WeightStore

DEADLINE_S = 50.0
CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
PROMPT = [1, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]


def write_native_model(folder: Path, seed: int) -> Path:
    """A random MoE with a byte-level tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    store = WeightStore(read_model_shape(folder), torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(view.shape, generator=generator) * 0.3 + (view.ndim == 1)
        for name, view in store.named.items()
    }
    save_file(tensors, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<unk>", "<s>", "</s>", *alphabet]
    vocabulary = {token: number for number, token in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def start_engine(folder: Path, ready: Path, *extra: str) -> "subprocess.Popen[bytes]":
    arguments = ["--model-path", str(folder), "--dtype", "float32", "--ready-file", str(ready)]
    command = [sys.executable, "-m", "workers.engines.native", *arguments, *extra]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


def wait_for_url(process: "subprocess.Popen[bytes]", ready: Path) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while not ready.exists():
        assert process.poll() is None, "the engine ended before it was ready"
        assert time.monotonic() < deadline, "the engine is not ready"
        time.sleep(0.02)
    return str(json.loads(ready.read_text())["url"])


@dataclass(slots=True)
class NativeEngine:
    """A client of the served engine and the two model folders that it may load."""

    http: httpx.AsyncClient
    folders: tuple[Path, Path]
    config: dict[str, Any]

    def body(self, max_new_tokens: int = 4, **told: Any) -> dict[str, Any]:
        """A greedy ``/generate`` body on a prompt of 12 tokens."""
        sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "temperature": 0}
        sampling |= told.pop("sampling_params", {})
        return {"input_ids": PROMPT, "sampling_params": sampling} | told

    async def generate(self, **told: Any) -> Any:
        answer = await self.http.post("/generate", json=self.body(**told))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def long_call(
        self, rid: str, client: httpx.AsyncClient | None = None, **told: Any
    ) -> "asyncio.Task[httpx.Response]":
        """A call that runs until it is aborted, unless told otherwise."""
        told = {"max_new_tokens": 4000, "return_logprob": True, "rid": rid} | told
        call = (client or self.http).post("/generate", json=self.body(**told))
        return asyncio.create_task(call)

    async def until_load(self, running: int, waiting: int = 0) -> None:
        """Poll /v1/loads until that many requests run and wait, with some tokens decoded."""
        deadline = time.monotonic() + DEADLINE_S
        wanted = (running, waiting)
        while time.monotonic() < deadline:
            load = (await self.http.get("/v1/loads")).json()["loads"][0]
            enough = load["num_used_tokens"] >= (len(PROMPT) + 3) * running
            if (load["num_running_reqs"], load["num_waiting_reqs"]) == wanted and enough:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"never {running} running, {waiting} waiting")

    async def checksums(self) -> dict[str, str]:
        answer = await self.http.post("/weights_checker", json={"action": "checksum"})
        assert answer.json()["message"] == "Success."
        return dict(answer.json()["ranks"][0]["checksums"])


@pytest.fixture(scope="session")
def native_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("engine")
    return write_native_model(root / "v0", 0), write_native_model(root / "v1", 1)


@pytest.fixture(scope="session")
def native_url(
    native_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    ready = tmp_path_factory.mktemp("ready") / "engine.json"
    limits = ("--max-running-requests", "4", "--max-queued-requests", "4", "--exit-with-parent")
    process = start_engine(native_folders[0], ready, *limits, "--enable-return-routed-experts")
    try:
        yield wait_for_url(process, ready)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


@pytest.fixture
async def engine(native_url: str, native_folders: tuple[Path, Path]) -> AsyncIterator[NativeEngine]:
    """The served engine; afterwards it is idle, open and on its first weights again."""
    async with httpx.AsyncClient(base_url=native_url, timeout=DEADLINE_S) as client:
        yield NativeEngine(client, native_folders, dict(CONFIG))
        await client.post("/continue_generation")
        await client.post("/abort_request", json={"abort_all": True})
        update = {"model_path": str(native_folders[0]), "weight_version": "default"}
        assert (await client.post("/update_weights_from_disk", json=update)).status_code == 200
