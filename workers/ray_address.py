"""``RAY_ADDRESS``: its form, and whether somebody listens there. Needs no Ray."""

import asyncio
import os

from models.errors import ServiceUnreachable

VARIABLE = "RAY_ADDRESS"
PROBE_TIMEOUT_S = 5.0
"""For a TCP connection: a join of an address where nobody listens would block for a minute."""


async def require_listener(address: str) -> None:
    """Return when somebody accepts connections at ``address``; it may still not be Ray.

    Raises:
        ServiceUnreachable: no ``host:port``, or nobody answers there within five seconds.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ServiceUnreachable(
            f"{VARIABLE} is {address!r}; set it to host:port of a Ray cluster, or use the embedded "
            "stack (perdure up)"
        )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, OverflowError, TimeoutError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else str(error) or "timed out"
        raise ServiceUnreachable(
            f"no Ray cluster answers at {address} ({reason}); start it, or correct {VARIABLE}"
        ) from error
    writer.close()
