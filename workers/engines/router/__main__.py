"""``python -m workers.engines.router``: the router process.

Exit status: 0 after SIGTERM or SIGINT, 1 when the router failed, 2 for a usage error or a port
that is taken, said in one line.
"""

import logging
import sys

import uvloop

from models.errors import ConfigurationError
from workers.engines.lifecycle import bind, follow_parent
from workers.engines.router.options import parse_options
from workers.engines.router.server import RouterServer
from workers.engines.token_gate import take_token


def main(arguments: list[str]) -> int:
    """Route until told to stop; returns the exit status."""
    options = parse_options(arguments)
    if options.exit_with_parent:
        follow_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        token = take_token()
        listener = bind(options.host, options.port)
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2

    async def serve() -> None:
        await RouterServer(options, token).run(listener)

    uvloop.run(serve())  # half the processor time of a call under asyncio's own
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
