"""What the small servers of tests share: a port of loopback, connections, and HTTP/1.1 requests."""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Asked:
    """A request as it arrived."""

    method: str
    path: str
    """Without the query."""
    headers: dict[str, str]
    body: bytes
    raw: bytes
    """All of it."""


class LoopbackServer(ABC):
    """Serves within its context, on a free port."""

    def __init__(self) -> None:
        self.url = ""
        self.connections = 0
        """Accepted so far."""
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def listen(self) -> None:
        """Accept connections; after ``close`` on the same port, as a process started again."""
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", urlsplit(self.url).port or 0
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Refuse new connections and cut the open ones: to clients the server is gone."""
        if self._server is not None:
            for listener in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listener)
            await asyncio.sleep(0)  # asyncio leaks what was accepted and is not yet a transport
            self._server.close()
        for task in tuple(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    @abstractmethod
    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte until it is cut."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._server is None or not self._server.is_serving():
            writer.transport.abort()  # it was accepted while this server closed
            return
        self._serving.add(task)
        self.connections += 1
        try:
            await self._talk(reader, writer)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._serving.discard(task)
            writer.transport.abort()


async def read_request(reader: asyncio.StreamReader) -> Asked:
    """The next request; EOFError when the client has closed."""
    head = await reader.readuntil(b"\r\n\r\n")
    headers = headers_of(head)
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    method, target = head.decode("latin-1").split(" ", 2)[:2]
    return Asked(method, target.partition("?")[0], headers, body, head + body)


def headers_of(head: bytes) -> dict[str, str]:
    """Header fields by lower-case name, of a request or of an answer."""
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name.lower(): value.strip() for name, _, value in pairs}


def http_answer(status: int, body: bytes, **headers: str) -> bytes:
    """A whole answer of JSON; ``headers`` by name, ``_`` for ``-``."""
    fields = {"content_type": "application/json", "content_length": str(len(body)), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body
