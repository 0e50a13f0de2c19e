"""An httpx transport whose cost does not grow with the number of open calls.

httpx's connection pool walks all its connections at every request and every answer: 256 calls at
once took ten times the processor time of the same calls here. Each open call has a connection of
its own, and idle ones are a stack. A pool of one connection costs several times as much a call.
"""

import asyncio
import ssl
from functools import cache

import h11
import httpx

from activities.wire.whole_calls import CallConnection, CallLost

KEEPALIVE_EXPIRY_S = 5.0
"""An idle connection is not reused after this; servers keep theirs open for longer."""

_PORTS = {"http": 80, "https": 443}


class LaneTransport(httpx.AsyncBaseTransport):
    """Reads each answer wholly before it returns, so a connection is free when the call is over.

    A call has its caller's deadline: httpx's own time-outs are not looked at.
    """

    def __init__(self, keepalive_expiry_s: float = KEEPALIVE_EXPIRY_S) -> None:
        self._keepalive_expiry_s = keepalive_expiry_s
        self._idle: dict[tuple[str, bytes], list[CallConnection]] = {}
        self._open: set[CallConnection] = set()
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` on an idle connection, or on a new one.

        Raises:
            httpx.TransportError: the server could not be reached or hung up; in the second case it
                may or may not have done what it was asked for.
        """
        body = await request.aread()
        idle = self._idle.setdefault((request.url.scheme, request.url.netloc), [])
        connection = self._reused(idle) or await self._connect(request)
        whole = False
        try:
            answer = await connection.ask(
                request.method.encode(), request.url.raw_path, request.headers.raw, body
            )
            whole = True
        except CallLost as error:
            raise httpx.RemoteProtocolError(str(error), request=request) from error
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error), request=request) from error
        finally:
            if whole and connection.reusable and not self._closed:
                idle.append(connection)
            else:
                connection.hang_up()
        return httpx.Response(answer.status, headers=answer.headers, content=answer.body)

    async def aclose(self) -> None:
        """Hang up everywhere, open calls included."""
        self._closed = True
        self._idle.clear()
        for connection in tuple(self._open):
            connection.hang_up()

    def _reused(self, idle: list[CallConnection]) -> CallConnection | None:
        """The connection that was used last, unless the server may have closed it."""
        oldest = asyncio.get_running_loop().time() - self._keepalive_expiry_s
        while idle:
            connection = idle.pop()
            if connection.reusable and connection.idle_since >= oldest and connection.is_quiet:
                return connection
            connection.hang_up()
        return None

    async def _connect(self, request: httpx.Request) -> CallConnection:
        self._require_open()
        url = request.url
        if url.scheme not in _PORTS:
            raise httpx.UnsupportedProtocol(f"{url} is no address of a server", request=request)
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: CallConnection(self._open),
                url.host,
                url.port or _PORTS[url.scheme],
                ssl=_tls() if url.scheme == "https" else None,
            )
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        try:
            self._require_open()
        except RuntimeError:
            connection.hang_up()
            raise
        return connection

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the transport was closed: no call is sent any more")


@cache
def _tls() -> ssl.SSLContext:
    """One context a process: reading the certificates takes longer than a publication's calls."""
    return httpx.create_ssl_context()
