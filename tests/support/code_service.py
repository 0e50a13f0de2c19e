"""A service that really runs programs, each in a process of its own; loopback only."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_LIMIT_S = 20.0


def run_test(program: str, test: Any) -> bool:
    """Whether a statement holds after ``program``, or its output to an input is as expected."""
    source = program if isinstance(test, dict) else f"{program}\n{test}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", source],
        input=test["input"] if isinstance(test, dict) else "",
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode != 0:
        return False
    return not isinstance(test, dict) or done.stdout == test["output"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        results = [run_test(asked["program"], test) for test in asked["tests"]]
        known = self.path in ("/test_program", "/test_program_stdio")
        body = json.dumps({"results": results}).encode()
        self.send_response(200 if known else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


class _Broken(_Handler):
    """Runs nothing: no test passes."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = b'{"results": [false]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def code_service(*, broken: bool = False) -> Iterator[str]:
    """The address of a service that serves within the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Broken if broken else _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
