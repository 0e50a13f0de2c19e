"""An httpx transport whose cost does not grow with the number of open calls.

httpx's connection pool walks all its connections at every request and every answer: 256 calls at
once took ten times the processor time of the same calls here. Each open call has a lane, a pool of
one connection, and idle lanes are a stack.
"""

import ssl
from functools import cache

import httpx

KEEPALIVE_EXPIRY_S = 5.0
"""An idle connection is not reused after this; servers keep theirs open for longer."""


class LaneTransport(httpx.AsyncBaseTransport):
    """Reads each answer wholly before it returns, so a lane is free when the call is over."""

    def __init__(self, keepalive_expiry_s: float = KEEPALIVE_EXPIRY_S) -> None:
        self._keepalive_expiry_s = keepalive_expiry_s
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._busy: set[httpx.AsyncHTTPTransport] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` on an idle connection, or on a new one."""
        lane = self._idle.pop() if self._idle else self._new_lane()
        self._busy.add(lane)
        whole = False
        try:
            response = await lane.handle_async_request(request)
            try:
                content = await response.aread()
            finally:
                await response.aclose()
            whole = True
        finally:
            self._busy.discard(lane)
            if whole:
                self._idle.append(lane)
            else:
                # A cancelled call may leave its pool waiting for a connection for ever.
                await lane.aclose()
        return httpx.Response(
            response.status_code,
            headers=[
                (name, value)
                for name, value in response.headers.raw
                if name.lower() not in (b"content-encoding", b"transfer-encoding")
            ],
            content=content,
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        """Close every connection, those of open calls included."""
        for lane in (*self._idle, *self._busy):
            await lane.aclose()

    def _new_lane(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(
            verify=_tls(),
            trust_env=False,
            limits=httpx.Limits(max_connections=1, keepalive_expiry=self._keepalive_expiry_s),
        )


@cache
def _tls() -> ssl.SSLContext:
    """One context a process: reading the certificates takes longer than a publication's calls."""
    return httpx.create_ssl_context()
