"""A client of a served engine, native or SGLang, as the contract tests use it."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.support.engine_model import PROMPT

DEADLINE_S = 50.0
GATE_ROUND_TRIPS = 3
"""After so many answers on other connections a call sent before them has reached the gate."""


@dataclass(slots=True)
class ServedEngine:
    """One engine process, and the two model folders that it may load."""

    kind: str
    """``native`` or ``sglang``."""
    http: httpx.AsyncClient
    folders: tuple[Path, Path]
    config: dict[str, Any]
    max_queued: int = 4
    tolerance: float = 1e-4
    """Of log-probs that are computed in another order."""
    dtype: torch.dtype = torch.float32
    """Of its weights; the folders hold float32."""

    @property
    def url(self) -> str:
        return str(self.http.base_url).rstrip("/")

    @property
    def is_native(self) -> bool:
        return self.kind == "native"

    def body(self, max_new_tokens: int = 4, **told: Any) -> dict[str, Any]:
        """A greedy ``/generate`` body on a prompt of 12 tokens."""
        sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "temperature": 0}
        sampling |= told.pop("sampling_params", {})
        return {"input_ids": PROMPT, "sampling_params": sampling} | told

    async def generate(self, **told: Any) -> Any:
        answer = await self.http.post("/generate", json=self.body(**told))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def call(self, **told: Any) -> "asyncio.Task[httpx.Response]":
        """A call of which the answer is awaited later."""
        return asyncio.create_task(self.http.post("/generate", json=self.body(**told)))

    def long_call(
        self, rid: str, client: httpx.AsyncClient | None = None, **told: Any
    ) -> "asyncio.Task[httpx.Response]":
        """A call that runs until it is aborted, unless told otherwise."""
        told = {"max_new_tokens": 4000, "return_logprob": True, "rid": rid} | told
        call = (client or self.http).post("/generate", json=self.body(**told))
        return asyncio.create_task(call)

    async def load(self) -> dict[str, Any]:
        """The one entry of ``/v1/loads``."""
        return dict((await self.http.get("/v1/loads")).json()["loads"][0])

    async def until_load(self, running: int, waiting: int = 0) -> None:
        """Poll /v1/loads until that many requests run and wait, with some tokens decoded."""
        deadline = time.monotonic() + DEADLINE_S
        wanted = (running, waiting)
        load: dict[str, Any] = {}
        while time.monotonic() < deadline:
            load = await self.load()
            enough = load["num_used_tokens"] >= (len(PROMPT) + 3) * running
            if (load["num_running_reqs"], load["num_waiting_reqs"]) == wanted and enough:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"never {running} running, {waiting} waiting: {load}")

    async def until_gated(self, number: int) -> None:
        """Until so many calls that were sent wait at the gate. SGLang tells no number."""
        deadline = time.monotonic() + DEADLINE_S
        while self.is_native:
            if (await self.http.get("/server_info")).json()["num_gated_requests"] >= number:
                return
            assert time.monotonic() < deadline, f"never {number} at the gate"
            await asyncio.sleep(0.01)
        for _ in range(GATE_ROUND_TRIPS):
            assert (await self.http.get("/server_info")).status_code == 200

    async def update(self, folder: Path, version: str, **told: Any) -> httpx.Response:
        """``/update_weights_from_disk``."""
        body = {"model_path": str(folder), "weight_version": version} | told
        return await self.http.post("/update_weights_from_disk", json=body)

    async def checksums(self) -> dict[str, str]:
        answer = await self.http.post("/weights_checker", json={"action": "checksum"})
        assert answer.json()["message"] == "Success."
        return dict(answer.json()["ranks"][0]["checksums"])

    async def restore(self) -> None:
        """Open, idle and on its first weights again.

        Idle before the update: its flush ends an SGLang server that still has a running request,
        also one whose client is gone.
        """
        await self.http.post("/continue_generation", json={})
        await self.http.post("/pause_generation", json={"mode": "abort"})
        flushed = await self.http.post(f"/flush_cache?timeout={DEADLINE_S:g}")
        assert flushed.status_code == 200, flushed.text
        assert (await self.update(self.folders[0], "default")).status_code == 200
        await self.http.post("/continue_generation", json={})
