"""``python -m workers.engines.sglang``: one SGLang engine.

Exit status: 0 after SIGTERM or SIGINT, which end it at once; 1 when the server failed; 2 for a
usage or configuration error, said in one line or by SGLang itself.
"""

import asyncio
import logging
import sys

from models.errors import ConfigurationError
from workers.engines.lifecycle import follow_parent
from workers.engines.sglang.options import parse_options
from workers.engines.sglang.supervisor import Supervisor


def main(arguments: list[str]) -> int:
    """Run a server until it is told to stop or ends; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        options = parse_options(arguments)
        if options.exit_with_parent:
            follow_parent()

        async def supervise() -> int:
            return await Supervisor(options).run()

        return asyncio.run(supervise())
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
