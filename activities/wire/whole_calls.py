"""One HTTP/1.1 connection for whole requests and whole answers, one call at a time.

A general client costs several times as much per call; a call here is one write and one future.
"""

import asyncio
import select
from typing import NamedTuple, cast

import h11


class CallLost(Exception):
    """No complete answer: the server may or may not have done what it was asked for."""


class WholeAnswer(NamedTuple):
    """What a server answered, its body as it came but without transfer coding."""

    status: int
    headers: list[tuple[bytes, bytes]]
    """Names in lower case."""
    body: bytes


class CallConnection(asyncio.Protocol):
    """Made by ``loop.create_connection``; is in ``members`` while it is open."""

    def __init__(self, members: set["CallConnection"]) -> None:
        self._members = members
        self._http = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None
        self._incoming = select.poll()
        self._answer: asyncio.Future[WholeAnswer] | None = None
        self._head: h11.Response | None = None
        self._body: list[bytes] = []
        self.idle_since = 0.0
        """When its last call ended, on the loop's clock."""

    @property
    def reusable(self) -> bool:
        """Whether another call may be made on it, as far as the server has told."""
        return self._transport is not None and self._http.our_state is h11.IDLE

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits to be read: what comes on an idle connection is its end."""
        return not self._incoming.poll(0)

    def ask(
        self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> asyncio.Future[WholeAnswer]:
        """Send a call; ``headers`` say how long ``body`` is.

        The future fails with ``CallLost`` when the connection ends first.
        """
        answer: asyncio.Future[WholeAnswer] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            answer.set_exception(CallLost("the server hung up"))
            return answer
        head = self._http.send(h11.Request(method=method, target=target, headers=headers))
        self._answer = answer
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
        # No subclass of asyncio's under uvloop.
        self._transport = cast("asyncio.Transport", transport)
        self._incoming.register(transport.get_extra_info("socket"), select.POLLIN)
        self._members.add(self)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes of an answer."""
        self._read(data)

    def eof_received(self) -> None:
        """asyncio: the server sends no more; an answer without a length ends so."""
        self._read(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: it is closed."""
        self._lose(f"the server hung up: {exc}" if exc else "the server hung up")

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
            self._lose(f"no HTTP: {error}" if data else "the server hung up")

    def _finish(self) -> None:
        """The answer is complete; the connection is idle, or over when the server says so."""
        head, answer = self._head, self._answer
        body = b"".join(self._body)
        self._head, self._answer, self._body = None, None, []
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self.idle_since = asyncio.get_running_loop().time()
        if answer is not None and not answer.done() and head is not None:
            answer.set_result(WholeAnswer(head.status_code, list(head.headers), body))

    def _lose(self, reason: str) -> None:
        self._transport = None
        self._members.discard(self)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(CallLost(reason))
        self._answer = None
