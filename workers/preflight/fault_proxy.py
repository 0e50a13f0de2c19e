"""A loopback HTTP proxy that answers the next requests with chosen errors and counts all."""

import http.client
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit

_UPSTREAM_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 5.0
_PASSED_ON = ("content-type", "retry-after")


class Fault(NamedTuple):
    """An answer that the proxy gives itself."""

    status: int
    retry_after: str | None = None


class FaultProxy:
    """Passes requests on to ``upstream`` unless a fault is due; every request takes one."""

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        self._lock = threading.Lock()
        self._faults: deque[Fault] = deque()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.attempts = 0
        """Requests since ``plan``."""
        self.forwarded = 0
        """Those of them that went to ``upstream``."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def plan(self, faults: Iterable[Fault]) -> None:
        """Answer the next requests so, one each; and count from 0 again."""
        with self._lock:
            self._faults = deque(faults)
            self.attempts = self.forwarded = 0

    @contextmanager
    def running(self) -> Iterator["FaultProxy"]:
        """Serve within the block."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join(_STOP_TIMEOUT_S)

    def _take(self) -> Fault | None:
        with self._lock:
            self.attempts += 1
            if self._faults:
                return self._faults.popleft()
            self.forwarded += 1
            return None

    def _forward(
        self, path: str, body: bytes, content_type: str
    ) -> tuple[int, dict[str, str], bytes]:
        parts = self._upstream
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(parts.netloc, timeout=_UPSTREAM_TIMEOUT_S)
        try:
            connection.request(
                "POST", parts.path.rstrip("/") + path, body, {"content-type": content_type}
            )
            answer = connection.getresponse()
            headers = {
                name: value for name in _PASSED_ON if (value := answer.getheader(name)) is not None
            }
            return answer.status, headers, answer.read()
        except (OSError, http.client.HTTPException) as error:
            return 502, {}, f"{parts.scheme}://{parts.netloc} does not answer: {error}".encode()
        finally:
            connection.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            """One connection."""

            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                """Answer a request with the fault that is due, or pass it on."""
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                fault = proxy._take()
                if fault is None:
                    kind = self.headers.get("content-type", "application/json")
                    self._answer(*proxy._forward(self.path, body, kind))
                    return
                headers = {} if fault.retry_after is None else {"retry-after": fault.retry_after}
                self._answer(fault.status, headers, b'{"detail": "injected fault"}')

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: the cases do."""

            def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler
