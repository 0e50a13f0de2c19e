"""One HTTP/1.1 connection for whole requests and whole answers, one call at a time.

A general client costs several times as much per call; a call here is one write and one future. What
engines and routers say, an answer whose length is told, is read by hand; h11 reads every other one.
"""

import asyncio
import re
import select
from typing import NamedTuple, cast

import h11

Headers = list[tuple[bytes, bytes]]

_NAME = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_HEAD = re.compile(
    rb"[A-Z]+ [!-~]+ HTTP/1\.1\r\n(?:" + _NAME + rb": (?:[!-~](?:[ -~]*[!-~])?)?\r\n)+\r\n"
)
"""What needs no checks by h11 before it is sent."""
_ANSWER_HEAD = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9][0-9])(?: [ -~]*)?\r\n((?:" + _NAME + rb":[ -~]*\r\n)+)\r\n"
)
_MAX_HEAD = 16 * 1024
"""Bytes; h11 takes no more for a head either."""
_NO_BODY = (204, 304)
_SPECIAL = (b"connection", b"transfer-encoding", b"upgrade")


class CallLost(Exception):
    """No complete answer: the server may or may not have done what it was asked for."""


class WholeAnswer(NamedTuple):
    """What a server answered, its body as it came but without transfer coding."""

    status: int
    headers: Headers
    """Names in lower case."""
    body: bytes


class _Call(NamedTuple):
    """What was asked."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes


class CallConnection(asyncio.Protocol):
    """Made by ``loop.create_connection``; is in ``members`` while it is open."""

    def __init__(self, members: set["CallConnection"]) -> None:
        self._members = members
        self._transport: asyncio.Transport | None = None
        self._incoming = select.poll()
        self._call: _Call | None = None
        self._answer: asyncio.Future[WholeAnswer] | None = None
        self._status = 0
        """Of the answer that comes in; 0 before its head."""
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._missing = 0
        """Bytes of the body that are still to come."""
        self._http: h11.Connection | None = None
        """Reads this answer, which is not read by hand."""
        self.idle_since = 0.0
        """When its last call ended, on the loop's clock."""

    @property
    def reusable(self) -> bool:
        """Whether another call may be made on it, as far as the server has told."""
        return self._transport is not None and self._call is None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits to be read: what comes on an idle connection is its end."""
        return not self._incoming.poll(0)

    def ask(
        self, method: bytes, target: bytes, headers: Headers, body: bytes
    ) -> asyncio.Future[WholeAnswer]:
        """Send a call; ``headers`` say how long ``body`` is.

        The future fails with ``CallLost`` when the connection ends first.

        Raises:
            h11.LocalProtocolError: the headers are none; nothing was sent.
        """
        answer: asyncio.Future[WholeAnswer] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            answer.set_exception(CallLost("the server hung up"))
            return answer
        call = _Call(method, target, headers, body)
        head = _head_of(call)
        self._call, self._answer = call, answer
        # One write and so, mostly, one packet.
        self._transport.write(head + body)
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
        if self._call is None:
            self.hang_up()  # nothing was asked
        elif self._http is not None:
            self._read(self._http, data)
        elif self._status:
            self._take(data)
        else:
            self._begin(self._call, data)

    def eof_received(self) -> None:
        """asyncio: the server sends no more; an answer without a length ends so."""
        if self._http is not None:
            self._read(self._http, b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: it is closed."""
        self._lose(f"the server hung up: {exc}" if exc else "the server hung up")

    def _begin(self, call: _Call, data: bytes) -> None:
        """The first bytes of an answer: by hand, if its head is there and holds nothing special."""
        found = _ANSWER_HEAD.match(data, 0, _MAX_HEAD)
        headers = _headers_of(found[2]) if found is not None else []
        length = _plain_length(headers)
        # What is asked may end the connection as well as what is answered.
        plain = length is not None and not any(_is_special(*each) for each in call.headers)
        if found is None or not plain or int(found[1]) in _NO_BODY:
            self._http = _told_of(call)
            self._read(self._http, data)
            return
        self._status, self._headers, self._missing = int(found[1]), headers, length or 0
        self._take(data[found.end() :])

    def _take(self, data: bytes) -> None:
        """Bytes of a body whose length is known."""
        self._body.append(data)
        self._missing -= len(data)
        if self._missing == 0:
            self._finish(reusable=True)
        elif self._missing < 0:
            self._break_off("no HTTP: more came than the body's length")

    def _read(self, http: h11.Connection, data: bytes) -> None:
        try:
            http.receive_data(data)
            while (event := http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    self._status, self._headers = event.status_code, list(event.headers)
                elif isinstance(event, h11.Data):
                    self._body.append(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    quiet = http.trailing_data == (b"", False)
                    self._finish(reusable=quiet and http.their_state is h11.DONE)
                    return
                elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                    self.hang_up()
                    return
        except h11.RemoteProtocolError as error:
            self._break_off(f"no HTTP: {error}" if data else "the server hung up")

    def _finish(self, *, reusable: bool) -> None:
        """The answer is complete; the connection is idle, or over when the server says so."""
        told = WholeAnswer(self._status, self._headers, b"".join(self._body))
        answer = self._answer
        self._call, self._answer, self._http = None, None, None
        self._status, self._headers, self._body = 0, [], []
        self.idle_since = asyncio.get_running_loop().time()
        if answer is not None and not answer.done():
            answer.set_result(told)
        if not reusable:
            self.hang_up()

    def _break_off(self, reason: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._transport = None
        self._members.discard(self)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(CallLost(reason))
        self._answer = None


def _head_of(call: _Call) -> bytes:
    lines = [b"%b %b HTTP/1.1\r\n" % (call.method, call.target)]
    lines += [b"%b: %b\r\n" % header for header in call.headers]
    head = b"".join([*lines, b"\r\n"])
    if _REQUEST_HEAD.fullmatch(head) is None or head.count(b"\n") != len(lines) + 1:
        told = h11.Connection(h11.CLIENT).send(_request_of(call))  # it says what is wrong, if so
        return told or b""
    return head


def _request_of(call: _Call) -> h11.Request:
    return h11.Request(method=call.method, target=call.target, headers=call.headers)


def _told_of(call: _Call) -> h11.Connection:
    """A parser of the answer to ``call``."""
    http = h11.Connection(h11.CLIENT)
    http.send(_request_of(call))
    http.send_with_data_passthrough(h11.Data(data=call.body))
    http.send(h11.EndOfMessage())
    return http


def _headers_of(block: bytes) -> Headers:
    """The headers of lines that fit ``_ANSWER_HEAD``."""
    pairs = (line.partition(b":") for line in block[:-2].split(b"\r\n"))
    return [(name.lower(), value.strip(b" ")) for name, _, value in pairs]


def _plain_length(headers: Headers) -> int | None:
    """Bytes of a body that only its length frames, on a connection that stays; None for others."""
    length = None
    for name, value in headers:
        if name == b"content-length":
            if length is not None or not value.isdigit():
                return None
            length = int(value)
        elif _is_special(name, value):
            return None
    return length


def _is_special(name: bytes, value: bytes) -> bool:
    """Whether a header changes how a body is framed, or what becomes of the connection."""
    return name.lower() in _SPECIAL and value.lower() != b"keep-alive"
