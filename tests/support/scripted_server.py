"""A real HTTP server on loopback whose answers a test writes, one script a call."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = tuple[int, Any]
"""Status and body: bytes as they are, anything else as JSON."""
Script = Callable[[dict[str, Any]], Awaitable[Answer]]


@dataclass
class ScriptedServer:
    """Plays ``scripts`` in order, one a request; a request too many is answered with 500."""

    url: str = ""
    scripts: deque[Script] = field(default_factory=deque)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def then(self, *scripts: Script) -> None:
        """Append scripts."""
        self.scripts.extend(scripts)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one connection, until the client closes it."""
        try:
            while head := await _head(reader):
                length = int(head.get("content-length", "0"))
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                status, answer = await self._play(body)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                start = f"HTTP/1.1 {status} x\r\ncontent-length: {len(content)}\r\n\r\n"
                writer.write(start.encode() + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _play(self, body: dict[str, Any]) -> Answer:
        return await self.scripts.popleft()(body) if self.scripts else (500, b"no script left")


async def _head(reader: asyncio.StreamReader) -> dict[str, str]:
    """Header fields of the next request; empty at the end of the connection."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
    return {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}


@asynccontextmanager
async def scripted_server() -> AsyncIterator[ScriptedServer]:
    """Serve on a free port of loopback."""
    scripted = ScriptedServer()
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    scripted.url = f"http://{host}:{port}"
    try:
        yield scripted
    finally:
        server.close()
