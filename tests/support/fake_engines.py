"""Engines in memory, and the script that decides which call waits or fails."""

import asyncio
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from activities.wire.memory_marks import RESUMED, memory_state, settled_mark
from models.errors import ContractViolation, ServiceUnreachable
from models.ports import EngineHandle
from models.publication import ChecksumKind


def checksums_of(version: int) -> dict[str, str]:
    """What an engine that holds ``version`` answers."""
    return {"model.weight": f"{version + 1:016x}"}


@dataclass
class Script:
    """What shall happen at which call, and what did. A call is named like ``optimize 3``."""

    log: list[str] = field(default_factory=list)
    faults: dict[str, list[Exception]] = field(default_factory=dict)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What an evaluation of this phase reports instead."""
    _reached: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))

    def fail(self, call: str, *errors: Exception) -> None:
        """Let the next calls of this name raise."""
        self.faults.setdefault(call, []).extend(errors)

    def hold(self, call: str) -> asyncio.Event:
        """Let calls of this name wait until the returned event is set."""
        return self.gates.setdefault(call, asyncio.Event())

    async def reached(self, call: str) -> None:
        """Wait until a call of this name has begun."""
        await asyncio.wait_for(self._reached[call].wait(), 20)

    async def play(self, call: str) -> None:
        """Log the call, hold it at its gate, raise its fault."""
        self.log.append(call)
        self._reached[call].set()
        try:
            if call in self.gates:
                await self.gates[call].wait()
        except asyncio.CancelledError:
            self.log.append(f"{call} cancelled")
            raise
        if self.faults.get(call):
            raise self.faults[call].pop(0)


@dataclass
class FakeEngine:
    """One engine server's state."""

    name: str
    url: str
    incarnation: int = 0
    alive: bool = True
    deaf: bool = False
    """It lives and answers nothing."""
    version: int = -1
    paused: bool = False
    corrupt_loads: int = 0
    """So many loads end with other bytes than were exported."""
    loaded: dict[str, str] = field(default_factory=dict)
    mark: str = ""
    """What it says of its memory in the place of a version."""

    @property
    def handle(self) -> EngineHandle:
        return EngineHandle(name=self.name, url=self.url, incarnation=self.incarnation)


class FakeEngineClient:
    """``EngineControl`` on a ``FakeEngine``."""

    def __init__(self, engine: FakeEngine, script: Script) -> None:
        self.engine, self.script = engine, script

    def _answer(self) -> None:
        if not self.engine.alive or self.engine.deaf:
            raise ServiceUnreachable(f"{self.engine.url}: connection refused or no answer")

    async def health(self, *, timeout_s: float) -> bool:
        return self.engine.alive and not self.engine.deaf

    async def model_info(self) -> dict[str, Any]:
        self._answer()
        return {"weight_version": self.engine.mark or str(self.engine.version)}

    async def pause(self, mode: str) -> None:
        self._answer()
        self.engine.paused = True

    async def resume(self) -> None:
        self._answer()
        self.engine.paused = False

    async def release_memory(self, tags: Collection[str]) -> None:
        self._answer()
        assert self.engine.paused
        if memory_state(self.engine.mark).released != set(tags):
            await self.script.play(f"release {self.engine.name}")
            self._answer()
            self.engine.mark, self.engine.loaded = settled_mark(tags), {}

    async def resume_memory(self, tags: Collection[str]) -> None:
        self._answer()
        assert self.engine.paused
        await self.script.play(f"wake {self.engine.name}")
        self._answer()
        if not memory_state(self.engine.mark).is_known:
            raise ContractViolation(f"{self.engine.url}: nobody knows which memory it has")
        self.engine.mark = RESUMED

    async def update_weights_from_disk(self, path: str, version: int, timeout_s: float) -> None:
        self._answer()
        await self.script.play(f"load {self.engine.name} {version}")
        self._answer()
        if memory_state(self.engine.mark).released:
            raise ContractViolation(f"{self.engine.url}: its memory is released")
        self.engine.version, self.engine.mark = version, ""
        self.engine.loaded = checksums_of(version)
        if self.engine.corrupt_loads:
            self.engine.corrupt_loads -= 1
            self.engine.loaded = {"model.weight": "dead"}

    async def checksums(self, kind: ChecksumKind = "xxh3_64") -> dict[str, str]:
        self._answer()
        return self.engine.loaded

    async def aclose(self) -> None:
        return None
