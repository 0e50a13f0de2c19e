"""Connections of the engine client: reused, one an open call, usable after a cancelled call."""

import asyncio
import gzip
import json

import httpx
import pytest

from activities.wire.lanes import LaneTransport


class Server:
    """A real HTTP/1.1 server on loopback that counts connections and answers when told."""

    def __init__(self):
        self.connections = 0
        self.waiting = 0
        self.go = asyncio.Event()
        self.url = ""

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                self.waiting += 1
                await self.go.wait()
                self.waiting -= 1
                answer = gzip.compress(body)
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\nx-echo: yes\r\n"
                    b"content-length: %d\r\n\r\n" % len(answer) + answer
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@pytest.fixture
async def server():
    made = Server()
    listener = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    yield made
    made.go.set()
    listener.close()


@pytest.fixture
async def http():
    async with httpx.AsyncClient(transport=LaneTransport()) as client:
        yield client


async def test_an_open_call_has_its_own_connection_and_idle_ones_are_reused(server, http):
    calls = [asyncio.ensure_future(http.post(server.url, json=each)) for each in range(8)]
    while server.waiting < 8:
        await asyncio.sleep(0.005)
    server.go.set()
    answers = await asyncio.gather(*calls)
    assert [answer.json() for answer in answers] == [*range(8)]
    assert answers[0].headers["x-echo"] == "yes"
    for each in range(20):
        assert (await http.post(server.url, json=each)).json() == each
    assert server.connections == 8


async def test_a_cancelled_call_leaves_a_usable_transport(server, http):
    call = asyncio.ensure_future(http.post(server.url, json=1))
    while server.waiting < 1:
        await asyncio.sleep(0.005)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    server.go.set()
    for each in range(3):
        assert json.loads((await http.post(server.url, json=each)).content) == each
    assert server.connections == 2  # the cancelled call's connection is never used again


async def test_calls_cancelled_at_any_moment_leave_no_stuck_lane(server, http):
    server.go.set()
    for ticks in range(40):
        call = asyncio.ensure_future(http.post(server.url, json=ticks))
        for _ in range(ticks):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        async with asyncio.timeout(5):
            assert (await http.post(server.url, json=ticks)).json() == ticks


async def test_a_closed_client_refuses_calls(server, http):
    call = asyncio.ensure_future(http.post(server.url, json=1))
    while server.waiting < 1:
        await asyncio.sleep(0.005)
    call.cancel()
    await asyncio.wait({call})
    await http.aclose()
    with pytest.raises(RuntimeError):
        await http.post(server.url, json=1)
