"""Command line of the router."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from activities.wire import health
from workers.engines.arguments import positive_int, positive_seconds


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Everything that the process is told at start. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = 0
    ready_file: Path | None = None
    keep_alive_s: float = 60.0
    """Well above the five seconds for which clients reuse an idle connection: a server that closes
    one at that very age cuts requests that are on their way."""
    max_queued_requests: int = 4096
    queue_timeout_s: float = 360.0
    health_interval_s: float = health.INTERVAL_S
    health_timeout_s: float = health.TIMEOUT_S
    health_failures: int = health.FAILURES
    group_expiry_s: float = 600.0
    shutdown_timeout_s: float = 2.0
    exit_with_parent: bool = False


def build_parser() -> argparse.ArgumentParser:
    """The argument parser; defaults are those of ``RouterOptions``."""
    told = RouterOptions()
    parser = argparse.ArgumentParser(
        prog="python -m workers.engines.router",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default=told.host, help="address to listen on")
    add("--port", type=int, default=told.port, help="0 picks a free port; see the ready file")
    add("--ready-file", type=Path, help="JSON {port, pid, url}, written when serving")

    def seconds(name: str, default: float, text: str) -> None:
        add(name, type=positive_seconds, default=default, help=f"seconds {text}")

    seconds("--keep-alive-s", told.keep_alive_s, "for which an idle client connection stays open")
    add(
        "--max-queued-requests",
        type=positive_int,
        default=told.max_queued_requests,
        help="calls that may wait for a routable engine",
    )
    seconds("--queue-timeout-s", told.queue_timeout_s, "for which a call waits for an engine")
    seconds("--health-interval-s", told.health_interval_s, "from one health check to the next")
    seconds("--health-timeout-s", told.health_timeout_s, "for the answer to a health check")
    add(
        "--health-failures",
        type=positive_int,
        default=told.health_failures,
        help="failed checks in a row that end an engine's use for ever",
    )
    seconds(
        "--group-expiry-s", told.group_expiry_s, "after which an idle prompt group is forgotten"
    )
    seconds("--shutdown-timeout-s", told.shutdown_timeout_s, "for running calls after SIGTERM")
    add("--exit-with-parent", action="store_true", help="stop when the parent process ends")
    return parser


def parse_options(arguments: list[str]) -> RouterOptions:
    """Parse the command line. Exits with status 2 on a usage error, as argparse does."""
    return RouterOptions(**vars(build_parser().parse_args(arguments)))
