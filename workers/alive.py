"""``python -m workers.alive [HOST:PORT]``: a container's health check; exit status 0 or 1.

Somebody must accept connections at the address, by default where the worker of this environment
answers ``/metrics``. A worker whose event loop is blocked has ended by itself.
"""

import socket
import sys

from workers.metrics_address import WORKER_METRICS, metrics_address

TIMEOUT_S = 3.0


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    address = arguments[0] if arguments else metrics_address(WORKER_METRICS)
    if address is None:
        sys.stderr.write(f"{WORKER_METRICS} is not set\n")
        return 1
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S):
            return 0
    except OSError as error:
        sys.stderr.write(f"{address}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
