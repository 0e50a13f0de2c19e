"""A real HTTP server on loopback whose answers a test writes, one script a call."""

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from tests.support.loopback import LoopbackServer, http_answer, read_request

Answer = tuple[int, Any]
"""Status and body: bytes as they are, anything else as JSON."""
Script = Callable[[dict[str, Any]], Awaitable[Answer]]


class ScriptedServer(LoopbackServer):
    """Plays ``scripts`` in order, one a request; a request too many is answered with 500."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: deque[Script] = deque()
        self.bodies: list[dict[str, Any]] = []

    def then(self, *scripts: Script) -> None:
        """Append scripts."""
        self.scripts.extend(scripts)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            body = json.loads((await read_request(reader)).body)
            self.bodies.append(body)
            status, answer = await self._play(body)
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            writer.write(http_answer(status, content))
            await writer.drain()

    async def _play(self, body: dict[str, Any]) -> Answer:
        return await self.scripts.popleft()(body) if self.scripts else (500, b"no script left")
