"""A real router process, and small HTTP engines in this process that do as they are told."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from activities.wire.client import EngineClient
from activities.wire.engine_pool import EnginePool
from activities.wire.router_client import RouterClient
from models.ids import FenceToken
from models.routing import EngineState, RoutedEngine, RouterState, RoutingTable
from tests.support.loopback import LoopbackServer, http_answer, read_request

DEADLINE_S = 30.0

engine_client = partial(EngineClient, vocab_size=512, context_length=4096)
"""A client that may generate on the small models of tests."""
pool_of_engines = partial(EnginePool, engine_client)


class StubEngine(LoopbackServer):
    """A loopback engine: counts calls, holds them while ``go`` is clear, tells a version."""

    def __init__(self, name: str, version: int = 0) -> None:
        super().__init__()
        self.name = name
        self.version = version
        self.healthy = True
        self.status = 200
        self.reason = "stop"
        self.go = asyncio.Event()
        self.go.set()
        self.bodies: list[bytes] = []
        self.aborts: list[bytes] = []
        self.active = 0
        self.hung_up = 0
        """Calls whose client left before the answer."""
        self.health_checks = 0

    def routed(self, **changes: Any) -> RoutedEngine:
        """How a table names this engine."""
        facts = {
            "name": self.name,
            "url": self.url,
            "incarnation": 0,
            "version": self.version,
            "digest": f"digest-{self.version}",
            "state": EngineState.SERVING,
        }
        return RoutedEngine(**{**facts, **changes})

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            asked = await read_request(reader)
            route = f"{asked.method} {asked.path}"
            status, answer = await self._answer(route, asked.body, reader)
            writer.write(http_answer(status, answer, x_own="1"))

    async def _answer(
        self, route: str, body: bytes, reader: asyncio.StreamReader
    ) -> tuple[int, bytes]:
        if route == "POST /generate":
            return await self._generate(body, reader)
        if route == "POST /abort_request":
            self.aborts.append(body)
            return 200, b""
        if route == "GET /health":
            self.health_checks += 1
            return (200 if self.healthy else 503), b""
        return 200, json.dumps({"weight_version": str(self.version)}).encode()

    async def _generate(self, body: bytes, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        self.bodies.append(body)
        self.active += 1
        going = asyncio.ensure_future(self.go.wait())
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({going, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not going.done():
                self.hung_up += 1
                raise ConnectionResetError("the client left")
        finally:
            self.active -= 1
            for each in (going, leaving):
                each.cancel()
            await asyncio.gather(going, leaving, return_exceptions=True)
        if b'"sampling_params"' in body:
            return self.status, self._sampled(json.loads(body))
        return self.status, b'{"engine": "%s",  "echo": %s}' % (self.name.encode(), body or b"0")

    def _sampled(self, body: dict[str, Any]) -> bytes:
        """One token, as the engine contract wants it."""
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": self.reason},
            "weight_version": str(self.version),
            "output_token_logprobs": [[-0.5, 7, None]],
        }
        return json.dumps({"output_ids": [7], "meta_info": meta}).encode()


def token(epoch: int = 1, update: int = 0, attempt: int = 1) -> FenceToken:
    return FenceToken(epoch=epoch, update=update, attempt=attempt)


def table(*engines: StubEngine | RoutedEngine, versions: tuple[int, ...] = (0,)) -> RoutingTable:
    """A table of engines under the committed ``versions``."""
    return RoutingTable(
        engines=tuple(e.routed() if isinstance(e, StubEngine) else e for e in engines),
        committed=tuple((version, f"digest-{version}") for version in versions),
    )


class RouterProcess:
    """A router process and its control client."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url
        self.control = RouterClient(url)

    async def until(self, condition: Callable[[RouterState], bool]) -> RouterState:
        """The state as soon as ``condition`` holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition(state := await self.control.state()):
                await asyncio.sleep(0.01)
        return state


@asynccontextmanager
async def router_process(folder: Path, *options: str) -> AsyncIterator[RouterProcess]:
    """``python -m workers.engines.router`` with ``options``; ended by SIGTERM, checked."""
    ready = folder / f"router-{time.monotonic_ns()}.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers.engines.router", "--ready-file", str(ready)),
        *("--exit-with-parent", *options),
        env=dict(os.environ),
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not ready.exists():
                assert process.returncode is None, "the router ended before it was ready"
                await asyncio.sleep(0.02)
        router = RouterProcess(process, str(json.loads(ready.read_text())["url"]))
        yield router
        await router.control.aclose()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0
