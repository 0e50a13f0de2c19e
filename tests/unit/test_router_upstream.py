"""The router's connections to an engine: a call that was given up is never sent afterwards."""

import asyncio

import pytest

from workers.engines.router.upstream import Upstream, UpstreamLost


async def test_an_engine_that_is_given_up_while_a_call_connects_is_not_asked():
    asked = []

    async def serve(reader, writer):
        asked.append(await reader.read(1))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        upstream = Upstream(f"http://127.0.0.1:{port}")
        call = asyncio.ensure_future(upstream.call(b"POST", b"/generate", b"{}"))
        await asyncio.sleep(0)  # it connects
        upstream.close()
        async with asyncio.timeout(5):
            with pytest.raises(UpstreamLost, match="not used any more"):
                await call
    assert b"P" not in asked
