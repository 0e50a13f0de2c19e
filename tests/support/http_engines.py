"""Fake engines behind real HTTP, each with a fault proxy in front: what a publication talks to."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any, Self

from activities.site import Site
from activities.wire.client import EngineClient
from tests.support.fake_engines import FakeEngine, Script, checksums_of
from tests.support.fake_fleet import FakeFleet, ListTracker
from tests.support.fault_proxy import FaultProxy
from tests.support.loopback import LoopbackServer, http_answer, read_request

PAUSE, LOAD = "/pause_generation", "/update_weights_from_disk"
CHECK, RESUME = "/weights_checker", "/continue_generation"
STEPS = {PAUSE: "pause", LOAD: "load", CHECK: "verify", RESUME: "resume"}


class EngineServer(LoopbackServer):
    """The control calls of one ``FakeEngine`` over HTTP/1.1, logged as ``<step> <name>``."""

    def __init__(self, engine: FakeEngine, script: Script) -> None:
        super().__init__()
        self.engine, self._script = engine, script

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            asked = await read_request(reader)
            if not self.engine.alive:
                return
            answer = await self._answer(asked.path, json.loads(asked.body or b"{}"))
            writer.write(http_answer(200, json.dumps(answer).encode()))
            await writer.drain()

    async def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        engine = self.engine
        if path in STEPS:
            await self._script.play(f"{STEPS[path]} {engine.name}")
        if path == PAUSE:
            engine.paused = True
        elif path == RESUME:
            engine.paused = False
        elif path == LOAD:
            assert engine.paused, "loaded under live requests"
            assert body["flush_cache"] is True
            engine.version = int(body["weight_version"])
            engine.loaded = checksums_of(engine.version)
            return {"success": True, "message": "loaded"}
        elif path == CHECK:
            return {"success": True, "ranks": [{"checksums": engine.loaded}]}
        return {"weight_version": str(engine.version), "message": "ok"}


class HttpFleet(FakeFleet):
    """A fake fleet whose engines are reached over HTTP, through ``proxies`` by engine name."""

    def __init__(self, num_engines: int = 2, *, with_router: bool = True) -> None:
        super().__init__(num_engines, with_router=with_router)
        self.proxies: dict[str, FaultProxy] = {}
        """The proxy of each engine's present incarnation."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def spawn(self, name: str, incarnation: int) -> FakeEngine:
        engine = FakeEngine(name, "", incarnation)
        server = await self._stack.enter_async_context(EngineServer(engine, self.script))
        proxy = await self._stack.enter_async_context(FaultProxy(server.url))
        engine.url = proxy.url
        self.proxies[name] = proxy
        return engine

    def site(self, tracker: ListTracker | None = None) -> Site:
        """Real engine clients; the router is the fake one."""
        return Site(
            fleet=self,
            tracker=tracker or ListTracker(),
            engine=EngineClient,
            router=self.router_client,
        )
