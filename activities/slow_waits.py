"""Waits on infrastructure that take long say so: what is waited for, how long, until when."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import structlog

from activities.multiplier import infra_timeout_multiplier

WARN_S = 30.0
"""A wait is told of after this long, or at its deadline before the multiplier if that is sooner;
and again every so often."""

_log = structlog.get_logger(__name__)


@contextmanager
def told_while_slow(operation: str, timeout_s: float | None) -> Iterator[None]:
    """Log warnings while the block takes long, and a line at its end if there was one.

    Ends nothing by itself: errors and cancellation pass unchanged. Needs a running event loop.

    Args:
        operation: what is waited for.
        timeout_s: deadline of the wait, the multiplier included; None: it has none.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    unscaled_s = WARN_S if timeout_s is None else timeout_s / infra_timeout_multiplier()
    first_s = min(WARN_S, unscaled_s)
    timers: list[asyncio.TimerHandle] = []

    def told() -> dict[str, object]:
        return {
            "operation": operation,
            "elapsed_s": round(loop.time() - started, 1),
            "warning_s": first_s,
            "deadline_s": timeout_s,
        }

    def warn() -> None:
        _log.warning("still waiting", **told())
        timers[:] = [loop.call_later(WARN_S, warn)]

    timers.append(loop.call_later(first_s, warn))
    try:
        yield
    finally:
        timers[0].cancel()
        if loop.time() - started >= first_s:
            _log.warning("the wait is over", **told())


def http_operation(method: str, url: str, path: str) -> str:
    """``HTTP METHOD host:port/path``, without credentials and query."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = "" if parts.port is None else f":{parts.port}"
    return f"HTTP {method} {host}{port}{parts.path.rstrip('/')}{path.partition('?')[0]}"
