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

PAUSE, LOAD = "/pause_generation", "/update_weights_from_disk"
CHECK, RESUME = "/weights_checker", "/continue_generation"
STEPS = {PAUSE: "pause", LOAD: "load", CHECK: "verify", RESUME: "resume"}


class EngineServer:
    """The control calls of one ``FakeEngine`` over HTTP/1.1, logged as ``<step> <name>``."""

    def __init__(self, engine: FakeEngine, script: Script) -> None:
        self.engine, self._script = engine, script
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                path = head.split(" ", 2)[1].partition("?")[0]
                lengths = [
                    line for line in head.split("\r\n") if line.startswith("content-length:")
                ]
                length = int(lengths[0].partition(":")[2]) if lengths else 0
                body = await reader.readexactly(length)
                if not self.engine.alive:
                    return
                content = json.dumps(await self._answer(path, json.loads(body or b"{}"))).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._serving.discard(task)
            writer.transport.abort()

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
