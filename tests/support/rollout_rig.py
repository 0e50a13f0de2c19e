"""A scripted engine and a small run for the rollout tests: no sockets, no models."""

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from activities.rollout.producer import RolloutProducer
from activities.storage.layout import TRAIN_JSONL
from activities.storage.store import Store
from activities.verifiers.registry import VerifierSet, build_verifiers
from activities.wire.client import EngineClient
from activities.wire.contract import ABORT_REQUEST, GENERATE
from configs.run import RunSpec
from models.ids import RunRef
from models.prompt import DataState, PreparedPrompt, PromptMetadata, VerifierTarget

EOS = 0
VOCAB_SIZE = 256
Script = Callable[[httpx.Request], Awaitable[httpx.Response]]


class ScriptedEngine:
    """Answers ``/generate`` as told; by default ``y`` for an even sampling seed, else ``n``."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.version = "0"
        self.next_scripts: deque[Script] = deque()
        """Consumed before ``script``, one a request."""
        self.script: Script = self.answer
        self.open = asyncio.Event()
        self.open.set()
        self.bodies: list[dict[str, Any]] = []
        self.active = 0
        self.max_active = 0
        self.cancelled = 0
        self.aborts = 0
        """Calls of ``/abort_request`` with ``abort_all``."""

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != GENERATE:
            self.aborts += request.url.path == ABORT_REQUEST
            return httpx.Response(200, json={})
        self.bodies.append(json.loads(request.content))
        self.active += 1
        self.max_active = max(self.max_active, self.active)
        try:
            script = self.next_scripts.popleft() if self.next_scripts else self.script
            return await script(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1

    async def answer(self, request: httpx.Request) -> httpx.Response:
        await self.open.wait()
        seed = json.loads(request.content)["sampling_params"]["sampling_seed"]
        return self.say(request, "y" if seed % 2 == 0 else "n")

    def say(
        self, request: httpx.Request, text: str, reason: str = "stop", **meta: Any
    ) -> httpx.Response:
        """The answer ``text`` with an end token unless it was cut."""
        body = json.loads(request.content)
        ids = [ord(letter) for letter in text] + ([EOS] if reason == "stop" else [])
        answer = {
            "text": text,
            "output_ids": ids,
            "meta_info": {
                "id": body["rid"],
                "finish_reason": {"type": reason},
                "weight_version": self.version,
                "completion_tokens": len(ids),
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
                **meta,
            },
        }
        return httpx.Response(200, json=answer)

    def saying(self, text: str, reason: str = "stop", **meta: Any) -> Script:
        async def script(request: httpx.Request) -> httpx.Response:
            await self.open.wait()
            return self.say(request, text, reason, **meta)

        return script

    @staticmethod
    def failing(status: int, body: Any) -> Script:
        async def script(request: httpx.Request) -> httpx.Response:
            return httpx.Response(status, json=body)

        return script

    @staticmethod
    def dropping() -> Script:
        async def script(request: httpx.Request) -> httpx.Response:
            raise httpx.ReadError("connection closed")

        return script


class RolloutRig:
    """Makes producers over one store, one set of scripted engines and one run file."""

    def __init__(self, root: Path) -> None:
        self.store = Store(str(root))
        self.run = RunRef(run_id="train/rig", root=str(root), spec_sha256="0" * 64)
        self.engines = {url: ScriptedEngine(url) for url in ("http://one", "http://two")}
        self.engine = self.engines["http://one"]
        self.now: Callable[[], float] | None = None
        self.producers: list[RolloutProducer] = []

    def spec(self, **sections: dict[str, Any]) -> RunSpec:
        base: dict[str, Any] = {
            "schema_version": 1,
            "name": "rig",
            "model": {"source": "tiny"},
            "data": {"prompt_data": "train.jsonl", "seed": 17},
            "output": {"root": self.store.root},
            "training": {"rollout_batch_size": 4, "samples_per_prompt": 4},
            "core": {"filter_zero_std_groups": False, "max_context_length": 64},
            "inference": {"max_response_length": 8, "server_concurrency": 64},
        }
        for name, section in sections.items():
            base[name] = {**base.get(name, {}), **section}
        return RunSpec.model_validate(base)

    def async_spec(self, **sections: dict[str, Any]) -> RunSpec:
        """``spec`` of a fully async run: one engine, groups of two, batches of two."""
        base: dict[str, dict[str, Any]] = {
            "async": {"fully_async": True, "async_max_concurrent_samples": 8},
            "training": {"rollout_batch_size": 2, "samples_per_prompt": 2},
            "core": {"pipeline_observation_interval_s": 0},
        }
        names = {*base, *sections}
        return self.spec(**{n: {**base.get(n, {}), **sections.get(n, {})} for n in names})

    def prompts(self, count: int, split: str = "train") -> list[PreparedPrompt]:
        return [self.prompt(row, split) for row in range(count)]

    @staticmethod
    def prompt(row: int, split: str = "train", target: str = "y") -> PreparedPrompt:
        ids = tuple(ord(letter) for letter in f"{split}{row}")
        return PreparedPrompt(
            input=f"{split}{row}",
            label=target,
            prompt_token_ids=ids,
            metadata=PromptMetadata(
                prepared_sample_id=f"task:{split}:{row}",
                source_dataset="task",
                source_row=row,
                query=f"{split}{row}",
                verifiers=(VerifierTarget(name="exact", target=target),),
                run_prompt_tokens=len(ids),
                run_prompt_token_ids_sha256="",
            ),
        )

    def connect(self, url: str) -> EngineClient:
        engine = self.engines[url]
        return EngineClient(
            url,
            vocab_size=VOCAB_SIZE,
            context_length=64,
            transport=httpx.MockTransport(engine.handle),
        )

    def producer(
        self,
        spec: RunSpec | None = None,
        *,
        num_prompts: int = 64,
        held_out: int = 3,
        state: DataState | None = None,
        verifiers: VerifierSet | None = None,
        **options: Any,
    ) -> RolloutProducer:
        if not self.store.exists(TRAIN_JSONL):
            self.store.write_bytes(TRAIN_JSONL, b"the training file\n")
        producer = RolloutProducer(
            spec or self.spec(),
            self.store,
            self.run,
            self.prompts(num_prompts),
            self.prompts(held_out, "eval"),
            verifiers or build_verifiers(),
            lambda ids: "".join(map(chr, ids)),
            state or DataState(),
            (EOS,),
            VOCAB_SIZE,
            connect=self.connect,
            **options,
        )
        self.producers.append(producer)
        return producer
