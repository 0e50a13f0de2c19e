"""Decrypts for Temporal's Web UI and stock CLI, over HTTP on loopback.

The protocol is Temporal's: ``POST /encode`` and ``POST /decode`` with ``{"payloads": [...]}`` in
protobuf's JSON. Whoever asks brings the token, as a bearer or, because the Web UI cannot set a
header, as the first part of the path. Browsers are answered for known origins only.
"""

import asyncio
import hmac
import json
import logging
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from google.protobuf import json_format
from temporalio.api.common.v1 import Payloads
from temporalio.converter import PayloadCodec

from activities.wire.token import bears
from models.errors import ConfigurationError

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 32 << 20
"""Above any page of a history: Temporal's own limit of an answer is 4 MiB."""
SOCKET_TIMEOUT_S = 30.0
_HEADERS = "content-type, x-namespace, authorization"

_log = logging.getLogger(__name__)


class CodecServer(ThreadingHTTPServer):
    """Listens on loopback from its making on; ``serve_forever`` answers."""

    daemon_threads = True

    def __init__(self, codec: PayloadCodec, token: str, origins: Sequence[str], port: int) -> None:
        """``origins``: ``http://host:port`` of each Web UI that may ask; ``port`` 0: a free one.

        Raises:
            ConfigurationError: the port cannot be had.
        """
        self.codec, self.token, self.origins = codec, token, frozenset(origins)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {LOOPBACK} port {port}: {error.strerror or error}"
            ) from error

    @property
    def url(self) -> str:
        """Address for clients that send the token as a bearer."""
        return f"http://{LOOPBACK}:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: CodecServer
    timeout = SOCKET_TIMEOUT_S
    protocol_version = "HTTP/1.1"

    def do_OPTIONS(self) -> None:
        """What a browser asks before it sends a call: no token comes with that."""
        self._answer(HTTPStatus.NO_CONTENT)

    def do_POST(self) -> None:
        """``/encode`` and ``/decode``. A body is read from whoever brings the token only."""
        work = self._work()
        if work is None:
            self._refuse(HTTPStatus.UNAUTHORIZED, "bring the token that this server was given")
            return
        convert = {"encode": self.server.codec.encode, "decode": self.server.codec.decode}.get(work)
        if convert is None:
            self._refuse(HTTPStatus.NOT_FOUND, "/encode and /decode are all there is")
            return
        length = self.headers.get("content-length", "")
        if not length.isascii() or not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a body of known, moderate length")
            return
        if self.headers.get("expect", "").lower() == "100-continue":
            self.send_response_only(HTTPStatus.CONTINUE)
            self.end_headers()
        body = self.rfile.read(int(length))
        try:
            asked = json_format.Parse(body, Payloads())
            done = asyncio.run(convert(asked.payloads))
        except (json_format.ParseError, UnicodeDecodeError):
            self._answer(HTTPStatus.BAD_REQUEST, 'the body is no {"payloads": [...]}')
        except ConfigurationError as error:
            self._answer(HTTPStatus.BAD_REQUEST, error.message)
        else:
            self._send(HTTPStatus.OK, json_format.MessageToJson(Payloads(payloads=done)).encode())

    def handle_expect_100(self) -> bool:
        """A client that asks whether its body is wanted hears so after its token was looked at."""
        return True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged for each call: a path may hold the token."""

    def _work(self) -> str | None:
        """The last part of the path, for whoever brings the token; None for others."""
        token = self.server.token
        parts = self.path.partition("?")[0].strip("/").split("/")
        if len(parts) == 2 and hmac.compare_digest(parts[0].encode(), token.encode()):
            return parts[1]
        header = self.headers.get("authorization", "").encode("latin-1", errors="replace")
        return parts[0] if len(parts) == 1 and bears(header, token) else None

    def _refuse(self, status: HTTPStatus, detail: str) -> None:
        """Answer without the body, which ends the connection: its rest is no next request."""
        self.close_connection = True
        self._answer(status, detail)

    def _answer(self, status: HTTPStatus, detail: str = "") -> None:
        self._send(status, json.dumps({"detail": detail}).encode() if detail else b"")

    def _send(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response_only(status)
        origin = self.headers.get("origin")
        if origin in self.server.origins:
            self.send_header("access-control-allow-origin", origin)
            self.send_header("access-control-allow-methods", "POST, OPTIONS")
            self.send_header("access-control-allow-headers", _HEADERS)
            self.send_header("vary", "origin")
        self.send_header("content-type", "application/json")
        self.send_header("cache-control", "no-store")
        if self.close_connection:
            self.send_header("connection", "close")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
