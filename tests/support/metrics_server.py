"""A real HTTP server on loopback that says one thing, for the readers of metrics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def serving(status: str, body: str, hold: asyncio.Event | None = None) -> AsyncIterator[str]:
    """A server that answers each request alike, once ``hold`` is set; gives its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        assert asked.startswith(b"GET /metrics HTTP/1.1")
        if hold is not None:
            await hold.wait()
        head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body.encode())}\r\n\r\n"
        writer.write((head + body).encode())
        await writer.drain()
        # the client says that it will not use the connection again
        assert await reader.read() == b""
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
