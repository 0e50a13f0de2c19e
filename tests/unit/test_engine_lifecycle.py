"""The engine's listening socket."""

import asyncio
import socket

from workers.engines.lifecycle import bind


async def test_accepted_connections_do_not_wait_for_delayed_acknowledgements() -> None:
    """With Nagle's algorithm on, each answer of two writes waits 40 ms on Linux."""
    accepted: asyncio.Queue[int] = asyncio.Queue()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        await accepted.put(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind("127.0.0.1", 0)
    server = await asyncio.start_server(serve, sock=listener)
    async with server:
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(accepted.get(), 10)
        writer.close()
