"""HTTP/1.1 connections from the router to one engine. One call is one request, never repeated."""

import asyncio
from collections import deque
from typing import NamedTuple
from urllib.parse import urlsplit

from activities.wire.token import bearer
from activities.wire.whole_calls import CallConnection, CallLost
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
        self._idle: deque[CallConnection] = deque()
        self._open: set[CallConnection] = set()
        self._closed = False

    async def call(self, method: bytes, path: bytes, body: bytes = b"") -> Answer:
        """The engine's answer. A caller that is cancelled hangs up, so that the engine notices.

        Raises:
            UpstreamLost: it could not be reached, hung up, or ``close`` was called.
        """
        connection = self._reused() or await self._connect()
        try:
            answer = await connection.ask(method, path, self._headers_of(method, body), body)
        except CallLost as error:
            raise UpstreamLost(str(error)) from error
        except BaseException:
            connection.hang_up()
            raise
        if connection.reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.hang_up()
        kind = next((value for name, value in answer.headers if name == b"content-type"), b"")
        return Answer(answer.status, kind, answer.body)

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

    def _reused(self) -> CallConnection | None:
        """The connection that was used last, if the engine can be taken to hold it open."""
        oldest = asyncio.get_running_loop().time() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since >= oldest and connection.is_quiet:
                return connection
            connection.hang_up()
        return None

    async def _connect(self) -> CallConnection:
        self._require_open()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: CallConnection(self._open), self._host, self._port
                )
        except (TimeoutError, OSError) as error:
            raise UpstreamLost(f"no connection: {str(error) or 'timed out'}") from error
        try:
            self._require_open()
        except UpstreamLost:
            connection.hang_up()
            raise
        return connection

    def _headers_of(self, method: bytes, body: bytes) -> list[tuple[bytes, bytes]]:
        if method == b"GET":
            return self._headers
        length = (b"content-length", b"%d" % len(body))
        return [*self._headers, (b"content-type", b"application/json"), length]

    def _require_open(self) -> None:
        if self._closed:
            raise UpstreamLost("the engine is not used any more")
