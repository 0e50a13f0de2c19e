"""Connections of the engine client: reused, one an open call, usable after a cancelled call."""

import asyncio
import gzip
import json
import socket
from contextlib import asynccontextmanager, closing

import httpx
import pytest
import uvloop

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


@asynccontextmanager
async def listening():
    made = Server()
    listener = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    yield made
    made.go.set()
    listener.close()


@pytest.fixture
async def server():
    async with listening() as made:
        yield made


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


async def test_a_connection_that_is_asked_for_once_is_closed(server, http):
    server.go.set()
    for each in range(3):
        answer = await http.post(server.url, json=each, headers={"connection": "close"})
        assert answer.json() == each
    assert server.connections == 3


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


async def serving(answers):
    """A server that says ``answers``, one a call, and hangs up; and its address."""
    rest = iter(answers)
    connections = []

    async def serve(reader, writer):
        connections.append(writer)
        while await reader.read(1 << 16):
            answer = next(rest)
            writer.write(answer)
            if answer.endswith(b"hang up"):
                break
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    return listener, connections, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def test_a_connection_that_the_server_closed_while_nobody_looked_is_not_used_again(http):
    listener, connections, url = await serving([GOOD, GOOD])
    with closing(listener):
        assert (await http.get(url)).text == "ok"
        (first,) = connections
        first.get_extra_info("socket").shutdown(socket.SHUT_WR)  # the loop did not see it yet
        assert (await http.get(url)).text == "ok"
        assert len(connections) == 2


@pytest.mark.parametrize(
    "answer",
    [b"hang up", b"no HTTP at all\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhang up"],
)
async def test_an_answer_that_is_not_whole_is_a_transport_error(http, answer):
    listener, _, url = await serving([answer])
    with closing(listener), pytest.raises(httpx.RemoteProtocolError):
        async with asyncio.timeout(5):
            await http.post(url, json=1)


async def test_answers_of_every_framing_are_whole(http):
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n"
    early = b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD
    to_the_end = b"HTTP/1.1 200 OK\r\n\r\nuntil they hang up"
    listener, connections, url = await serving([chunked, early, to_the_end])
    with closing(listener):
        found = [(await http.post(url, json=1)).text for _ in range(3)]
    assert found == ["ok", "ok", "until they hang up"]
    assert len(connections) == 1


@pytest.mark.parametrize("length", [1, 7, 40, 59, 60, 61])
async def test_an_answer_may_come_in_pieces_of_any_size(http, length):
    answer = b"HTTP/1.1 404 Not Found\r\nX-Told: a b\r\nContent-Length: 5\r\n\r\nwhole"
    connections = []

    async def serve(reader, writer):
        connections.append(writer)
        while await reader.read(1 << 16):
            for start in range(0, len(answer), length):
                writer.write(answer[start : start + length])
                await writer.drain()
                await asyncio.sleep(0.001)  # a packet of its own
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    with closing(listener):
        for _ in range(2):
            found = await http.post(url, json=1)
            assert (found.status_code, found.text, found.headers["x-told"]) == (404, "whole", "a b")
    assert len(connections) == 1


async def test_an_answer_without_a_body_is_whole_at_once(http):
    empty = [b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200\r\ncontent-length: 0\r\n\r\n"]
    listener, connections, url = await serving([*empty, GOOD])
    with closing(listener):
        found = [await http.post(url, json=1) for _ in range(3)]
    assert [(each.status_code, each.text) for each in found] == [(204, ""), (200, ""), (200, "ok")]
    assert len(connections) == 1


async def test_a_server_that_says_it_hangs_up_is_not_asked_again(http):
    last = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nConnection: close\r\n\r\nok"
    listener, connections, url = await serving([last, GOOD])
    with closing(listener):
        assert [(await http.post(url, json=1)).text for _ in range(2)] == ["ok", "ok"]
    assert len(connections) == 2


@pytest.mark.parametrize(
    "headers",
    [
        b"content-length: 2\r\ncontent-length: 3\r\n",
        b"content-length: -2\r\n",
        b"content-length: two\r\n",
        b"content-length : 2\r\n",
        b"content-length: 1\r\n",  # and two bytes come
    ],
)
async def test_an_answer_of_doubtful_length_is_a_transport_error(http, headers):
    listener, connections, url = await serving([b"HTTP/1.1 200 OK\r\n" + headers + b"\r\nok", GOOD])
    with closing(listener):
        with pytest.raises(httpx.RemoteProtocolError):
            async with asyncio.timeout(5):
                await http.post(url, json=1)
        assert (await http.post(url, json=1)).text == "ok"
    assert len(connections) == 2


async def test_nobody_there_is_a_connect_error(http):
    listener, _, url = await serving([])
    listener.close()
    await listener.wait_closed()
    with pytest.raises(httpx.ConnectError):
        await http.post(url, json=1)


@pytest.mark.parametrize("value", ["two\nlines", "two\r\nx-more: headers", "nul\0"])
async def test_a_header_that_http_does_not_take_is_not_sent(server, http, value):
    with pytest.raises(httpx.LocalProtocolError):
        await http.post(server.url, json=1, headers={"x-bad": value})


def test_calls_are_made_under_the_loop_of_an_actor():
    """Ray's actors run uvloop, whose transports are of no class of asyncio's."""

    async def calls():
        client = httpx.AsyncClient(transport=LaneTransport())
        async with asyncio.timeout(10), listening() as server, client as http:
            server.go.set()
            for _ in range(2):
                together = (http.post(server.url, json=each) for each in range(8))
                answers = await asyncio.gather(*together)
                assert [answer.json() for answer in answers] == [*range(8)]
            assert server.connections == 8

    uvloop.run(calls())
