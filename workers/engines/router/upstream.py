"""HTTP/1.1 connections from the router to one engine. One call is one request, never repeated.

A general client costs several times as much per call; a call here is one write and one future.
"""

import asyncio
from collections import deque
from typing import NamedTuple
from urllib.parse import urlsplit

import h11

from activities.wire.token import bearer
from models.errors import ConfigurationError

IDLE_S = 3.0
"""An idle connection is not used again after this. SGLang closes one after 5 s unless told
otherwise, and a call that is sent just then is lost."""
CONNECT_TIMEOUT_S = 5.0


class UpstreamLost(Exception):
    """No complete answer: the engine may or may not have done what it was asked for."""


class Answer(NamedTuple):
    """What an engine answered, its body as it came."""

    status: int
    content_type: bytes
    body: bytes


class Upstream:
    """The connections to one engine. An open call has one of its own; idle ones are a stack."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """``url``: ``http://host:port``, else ConfigurationError; ``token``: what it asks for."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.path.strip("/"):
            raise ConfigurationError(f"{url!r} is not an engine's address: give http://host:port")
        self._host, self._port = parts.hostname, parts.port or 80
        self._headers = [(b"host", parts.netloc.encode())]
        self._headers += [(n.encode(), v.encode()) for n, v in bearer(token).items()]
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()
        self._closed = False

    async def call(self, method: bytes, path: bytes, body: bytes = b"") -> Answer:
        """The engine's answer. A caller that is cancelled hangs up, so that the engine notices.

        Raises:
            UpstreamLost: it could not be reached, hung up, or ``close`` was called.
        """
        connection = self._reused() or await self._connect()
        try:
            answer = await connection.ask(method, path, body)
        except BaseException:
            connection.hang_up()
            raise
        if connection.reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.hang_up()
        return answer

    def drop_idle(self) -> None:
        """Close connections that are idle for too long."""
        oldest = asyncio.get_running_loop().time() - IDLE_S
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().hang_up()

    def close(self) -> None:
        """Hang up everywhere: calls that are open raise ``UpstreamLost``."""
        self._closed = True
        self._idle.clear()
        for connection in tuple(self._open):
            connection.hang_up()

    def _reused(self) -> "_Connection | None":
        """The connection that was used last, if the engine can be taken to hold it open."""
        oldest = asyncio.get_running_loop().time() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since >= oldest:
                return connection
            connection.hang_up()
        return None

    async def _connect(self) -> "_Connection":
        self._require_open()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._headers, self._open), self._host, self._port
                )
        except (TimeoutError, OSError) as error:
            raise UpstreamLost(f"no connection: {str(error) or 'timed out'}") from error
        try:
            self._require_open()
        except UpstreamLost:
            connection.hang_up()
            raise
        return connection

    def _require_open(self) -> None:
        if self._closed:
            raise UpstreamLost("the engine is not used any more")


class _Connection(asyncio.Protocol):
    """One connection, one call at a time. Is in ``members`` while it is open."""

    def __init__(self, headers: list[tuple[bytes, bytes]], members: set["_Connection"]) -> None:
        self._headers = headers
        self._members = members
        self._http = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._head: h11.Response | None = None
        self._body: list[bytes] = []
        self.idle_since = 0.0

    @property
    def reusable(self) -> bool:
        """Whether another call may be made on it."""
        return self._transport is not None and self._http.our_state is h11.IDLE

    def ask(self, method: bytes, path: bytes, body: bytes) -> asyncio.Future[Answer]:
        """Send a call; the future fails with ``UpstreamLost`` when the connection ends first."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            answer.set_exception(UpstreamLost("the engine hung up"))
            return answer
        self._answer = answer
        headers = list(self._headers)
        if method != b"GET":
            headers.append((b"content-type", b"application/json"))
            headers.append((b"content-length", b"%d" % len(body)))
        head = self._http.send(h11.Request(method=method, target=path, headers=headers))
        # One write and so, mostly, one packet; h11 would only hand the body's bytes back.
        self._http.send_with_data_passthrough(h11.Data(data=body))
        self._http.send(h11.EndOfMessage())
        self._transport.write((head or b"") + body)
        return answer

    def hang_up(self) -> None:
        """Close at once, whatever is on the way."""
        if self._transport is not None:
            self._transport.abort()
        self._lose("the call was given up")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._members.add(self)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes of an answer."""
        self._read(data)

    def eof_received(self) -> None:
        """asyncio: the engine sends no more; an answer without a length ends so."""
        self._read(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: it is closed."""
        self._lose(f"the engine hung up: {exc}" if exc else "the engine hung up")

    def _read(self, data: bytes) -> None:
        try:
            self._http.receive_data(data)
            while (event := self._http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    self._head = event
                elif isinstance(event, h11.Data):
                    self._body.append(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    self._finish()
                    return
                elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                    self.hang_up()
                    return
        except h11.RemoteProtocolError as error:
            if self._transport is not None:
                self._transport.abort()
            self._lose(f"no HTTP: {error}" if data else "the engine hung up")

    def _finish(self) -> None:
        """The answer is complete; the connection is idle, or over when the engine says so."""
        head, answer = self._head, self._answer
        body = b"".join(self._body)
        self._head, self._answer, self._body = None, None, []
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self.idle_since = asyncio.get_running_loop().time()
        if answer is not None and not answer.done() and head is not None:
            kind = next((value for name, value in head.headers if name == b"content-type"), b"")
            answer.set_result(Answer(head.status_code, kind, body))

    def _lose(self, reason: str) -> None:
        self._transport = None
        self._members.discard(self)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(UpstreamLost(reason))
        self._answer = None
