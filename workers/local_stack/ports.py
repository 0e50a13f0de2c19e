"""Which ports the stack listens on."""

import contextlib
import socket

from models.errors import ConfigurationError

TEMPORAL_PORT = 7233
"""Temporal's own default, so that the stock CLI finds the server without options."""
UI_PORT = 8233
RAY_PORT = 6379
LOOPBACK = "127.0.0.1"
RAY_WORKER_PORTS = range(10002, 20000)
"""Ray gives these to its workers: it refuses to start on one, and a worker may take any other's."""


def is_free(port: int) -> bool:
    """Whether a listener could bind the loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port that the kernel hands out, and that no worker of Ray may take later."""
    with contextlib.ExitStack() as refused:  # kept bound meanwhile, so that none comes twice
        while True:
            probe = refused.enter_context(socket.socket())
            probe.bind((LOOPBACK, 0))
            port: int = probe.getsockname()[1]
            if port not in RAY_WORKER_PORTS:
                return port


def choose(wanted: str | None, default: int, what: str, taken: tuple[int, ...] = ()) -> int:
    """The wanted port or an error; without a wish the default, or any free one if it is taken.

    ``taken`` are ports of the stack that nobody listens on yet.

    Raises:
        ConfigurationError: the wish is no port number, or the port is taken.
    """
    if wanted is None:
        return default if is_free(default) and default not in taken else free_port()
    if not wanted.isdigit() or not 0 < int(wanted) < 65536:
        raise ConfigurationError(f"{what}={wanted!r} is not a port number (1 to 65535)")
    if int(wanted) in taken:
        raise ConfigurationError(f"{what}={wanted}: the stack listens there already; give another")
    if not is_free(int(wanted)):
        raise ConfigurationError(
            f"{what}={wanted}: another process listens on {LOOPBACK}:{wanted}; end it, choose "
            "another port, or unset the variable to take any free one"
        )
    return int(wanted)
