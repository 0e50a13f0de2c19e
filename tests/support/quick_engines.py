"""Two engines behind a router, in memory and without HTTP: a token each turn of the loop or so."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from activities.rollout.producer import RolloutProducer
from activities.wire.contract import GenerateRequest, GenerateResponse, MetaInfo
from activities.wire.faults import CATEGORIES
from activities.wire.router_contract import GroupTag
from models.errors import GenerationFault
from models.ids import FenceToken
from tests.support.rollout_rig import EOS


@dataclass(eq=False)
class _Engine:
    version: int = -1
    draining: bool = False
    groups: Counter[str] = field(default_factory=Counter)
    """Calls that each group still owes."""


class QuickRouter:
    """``EngineClient`` of a router: a group stays on one engine; ``rng`` draws the faults."""

    def __init__(self, rng: random.Random, fault_share: float = 0.0) -> None:
        self.url = "http://one"
        self.rng = rng
        self.fault_share = fault_share
        self.engines = (_Engine(), _Engine())
        self.serving = asyncio.Event()
        self.serving.set()
        self.active = 0

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float, group: GroupTag
    ) -> GenerateResponse:
        engine = self._engine_of(group)
        try:
            self.active += 1
            return await self._answer(request, engine)
        finally:
            self.active -= 1
            engine.groups[group.group] -= 1
            if engine.groups[group.group] <= 0:
                del engine.groups[group.group]

    def _engine_of(self, tag: GroupTag) -> _Engine:
        for engine in self.engines:
            if tag.group in engine.groups:
                engine.groups[tag.group] = max(
                    engine.groups[tag.group], tag.expected - tag.answered
                )
                return engine
        free = [engine for engine in self.engines if not engine.draining]
        engine = min(free, key=lambda each: sum(each.groups.values()))
        engine.groups[tag.group] = tag.expected - tag.answered
        return engine

    async def _answer(self, request: GenerateRequest, engine: _Engine) -> GenerateResponse:
        if self.rng.random() < self.fault_share:
            await asyncio.sleep(0)
            raise GenerationFault("a drawn fault", self.rng.choice(CATEGORIES))
        ids: list[int] = []
        length = self.rng.randrange(1, 4)
        version, reason = engine.version, "stop"
        while len(ids) < length:
            await asyncio.sleep(0)
            if not self.serving.is_set():
                if ids:
                    reason = "abort"
                    break
                await self.serving.wait()
                version = engine.version
            ids.append(self.rng.choice((ord("y"), ord("n"))))
        if reason == "stop":
            ids[-1:] = [ids[-1], EOS]
        return GenerateResponse(
            output_ids=ids,
            meta_info=MetaInfo(
                id=request.rid,
                finish_reason={"type": reason},
                weight_version=str(version),
                output_token_logprobs=[(-0.5, token, None) for token in ids],
            ),
        )

    async def release_groups(self, groups: tuple[str, ...]) -> None:
        for engine in self.engines:
            for group in groups:
                engine.groups.pop(group, None)

    async def abort_all(self) -> None:
        return None

    async def aclose(self) -> None:
        return None

    async def publish(
        self, producer: RolloutProducer, token: FenceToken, version: int, mode: str
    ) -> None:
        """Load ``version`` everywhere, between the boundary's begin and end."""
        await producer.begin_publication(token, version)
        await self.load(version, mode)
        await producer.end_publication(token, version)

    async def load(self, version: int, mode: str) -> None:
        """Engine by engine when ``rolling``, else all at once while none serves."""
        if mode == "rolling":
            for engine in self.engines:
                engine.draining = True
                while engine.groups:
                    await asyncio.sleep(0)
                engine.version = version
                engine.draining = False
            return
        self.serving.clear()
        for _ in range(3):
            await asyncio.sleep(0)
        for engine in self.engines:
            engine.version = version
        self.serving.set()
