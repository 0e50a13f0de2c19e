"""Loopback proxies that break connections on purpose.

``FaultProxy`` understands HTTP/1.1 and breaks chosen requests:

    async with FaultProxy(engine_url) as proxy:
        proxy.fail_next(Close(), count=2)                  # the next two POST /generate
        proxy.fail_next(Answer(503, {"message": QUEUE_FULL}))
        proxy.plan = lambda seen: Delay(0.2) if seen.number % 2 else None   # all the others
        ... use proxy.url ...
        assert proxy.count("/generate") == 5

``LatentLink`` knows bytes only and delivers them late, closings too, as a network does.
"""

import asyncio
import contextlib
import json
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.support.loopback import Asked, LoopbackServer, headers_of, http_answer, read_request

DEADLINE_S = 60.0
"""For one answer of the server behind."""


@dataclass(frozen=True)
class Seen(Asked):
    """A request as it arrived at a proxy."""

    number: int
    """Counts all requests of the proxy from 0."""


@dataclass(frozen=True)
class Close:
    """Close the connection without an answer; the server behind never sees the request."""


@dataclass(frozen=True)
class Reset:
    """Pass the request on, send this share of the answer's bytes, then reset the connection."""

    share: float = 0.5


@dataclass(frozen=True)
class Answer:
    """Answer this; the server behind never sees the request. ``body``: bytes, or sent as JSON."""

    status: int
    body: Any = b""


@dataclass(frozen=True)
class Delay:
    """Pass the request on after this many seconds."""

    seconds: float


@dataclass(frozen=True)
class Hang:
    """Never answer; the server behind never sees the request."""


Fault = Close | Reset | Answer | Delay | Hang
Plan = Callable[[Seen], Fault | None]


class FaultProxy(LoopbackServer):
    """In front of the server at ``target``. Without a fault it changes no byte of an answer.

    ``idle_close_s``: close a client's connection that is idle for so long.
    """

    def __init__(self, target: str, *, idle_close_s: float | None = None) -> None:
        super().__init__()
        parts = urlsplit(target)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._idle_close_s = idle_close_s
        self._next: deque[tuple[str, Fault]] = deque()
        self.plan: Plan = lambda seen: None
        """Asked for every request that no ``fail_next`` is meant for."""
        self.requests: list[Seen] = []

    def fail_next(self, fault: Fault, *, count: int = 1, path: str = "/generate") -> None:
        """Break the next ``count`` requests of ``path``."""
        self._next.extend((path, fault) for _ in range(count))

    def count(self, path: str) -> int:
        """Requests of ``path`` so far, broken ones included."""
        return sum(seen.path == path for seen in self.requests)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await self._one(reader, writer):
            pass

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; whether the connection may serve another."""
        async with asyncio.timeout(self._idle_close_s):
            asked = await read_request(reader)
        seen = Seen(**vars(asked), number=len(self.requests))
        self.requests.append(seen)
        fault = self._fault(seen)
        if isinstance(fault, Close):
            return False
        if isinstance(fault, Hang):
            await reader.read()
            return False
        if isinstance(fault, Answer):
            writer.write(_answer(fault))
            return True
        if isinstance(fault, Delay):
            await asyncio.sleep(fault.seconds)
        answer = await self._ask(reader, seen.raw)
        if isinstance(fault, Reset):
            writer.write(answer[: round(len(answer) * fault.share)])
            await writer.drain()
            _reset_on_close(writer)
            return False
        writer.write(answer)
        await writer.drain()
        return True

    def _fault(self, seen: Seen) -> Fault | None:
        for index, (path, fault) in enumerate(self._next):
            if path == seen.path:
                del self._next[index]
                return fault
        return self.plan(seen)

    async def _ask(self, client: asyncio.StreamReader, request: bytes) -> bytes:
        """The raw answer of the server behind; hangs up there when the client does here."""
        reader, writer = await asyncio.open_connection(*self._target)
        asking = asyncio.ensure_future(_exchange(reader, writer, request))
        leaving = asyncio.ensure_future(_until_left(client))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise ConnectionResetError("the client left")
            return asking.result()
        finally:
            writer.transport.abort()
            for task in (asking, leaving):
                task.cancel()
            await asyncio.gather(asking, leaving, return_exceptions=True)


class LatentLink(LoopbackServer):
    """A TCP link to ``target`` that delivers everything ``latency_s`` later, closings included."""

    def __init__(self, target: str, latency_s: float) -> None:
        super().__init__()
        parts = urlsplit(target)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._latency_s = latency_s
        self.closing = asyncio.Event()
        """Set while a closing by the server behind is on its way to the client."""

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection(*self._target)
        try:
            await asyncio.gather(
                self._carry(reader, behind_writer),
                self._carry(behind_reader, writer, self.closing),
            )
        finally:
            behind_writer.transport.abort()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        closing: asyncio.Event | None = None,
    ) -> None:
        """Bytes in one direction until their end; each piece and the end arrive late."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                piece = await reader.read(65_536)
            except ConnectionError:
                piece = b""
            if piece:
                loop.call_later(self._latency_s, writer.write, piece)
                continue
            if closing is not None:
                closing.set()
            await asyncio.sleep(self._latency_s)
            if closing is not None:
                closing.clear()
            writer.transport.close()
            return


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> bytes:
    """Send ``request``; the raw bytes of the whole answer."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    headers = headers_of(head)
    if headers.get("transfer-encoding") == "chunked":
        return head + await _chunks(reader)
    return head + await reader.readexactly(int(headers.get("content-length", "0")))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """The raw bytes of a chunked body."""
    parts = []
    while True:
        line = await reader.readuntil(b"\r\n")
        chunk = await reader.readexactly(int(line.split(b";")[0], 16) + 2)
        parts += [line, chunk]
        if chunk == b"\r\n":
            return b"".join(parts)


async def _until_left(reader: asyncio.StreamReader) -> None:
    """Return when the client has closed; it sends nothing while it waits for an answer."""
    with contextlib.suppress(ConnectionError):
        await reader.read(1)


def _answer(answer: Answer) -> bytes:
    body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
    return http_answer(answer.status, body)


def _reset_on_close(writer: asyncio.StreamWriter) -> None:
    """Closing sends RST instead of FIN."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
