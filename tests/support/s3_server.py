"""A server of the S3 protocol in a process of its own, for runs whose processes all ask it."""

import logging
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = "perdure"
START_S = 60.0


@contextmanager
def s3_bucket() -> Iterator[dict[str, str]]:
    """A fresh server on loopback with an empty bucket; yields the environment of its clients."""
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        url = server.stdout.readline().strip()
        assert url.startswith("http://"), "the server said no address"
        urllib.request.urlopen(
            urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=START_S
        ).close()
        yield {
            "AWS_ENDPOINT_URL_S3": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.stdin.close()
        server.wait(START_S)
        server.stdout.close()


def main() -> None:
    """Serve until standard input ends; the first line of output is the address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()
    os._exit(0)  # its threads may still answer somebody


if __name__ == "__main__":
    main()
