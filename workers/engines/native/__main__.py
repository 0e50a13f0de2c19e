"""``python -m workers.engines.native``: one engine process.

Exit status: 0 after SIGTERM or SIGINT, 1 when the engine failed, 2 for a usage or configuration
error (a folder without weights, a port that is taken), said in one line.
"""

import asyncio
import logging
import os
import sys

# Before torch loads OpenMP: spinning threads starve the trainer that shares the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from models.errors import ConfigurationError
from workers.engines.lifecycle import bind, follow_parent
from workers.engines.native.model_files import safetensor_files
from workers.engines.native.model_shape import read_model_shape
from workers.engines.native.options import parse_options
from workers.engines.token_gate import take_token

SWITCH_INTERVAL_S = 0.0005
"""The model thread gets the interpreter back this soon after the event loop took it."""


def main(arguments: list[str]) -> int:
    """Run an engine until it is told to stop; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        options, token = parse_options(arguments), take_token()
        if options.exit_with_parent:
            follow_parent()
        os.environ.setdefault("OMP_NUM_THREADS", str(options.num_threads))
        shape = read_model_shape(options.model_path)
        safetensor_files(options.model_path)
        listener = bind(options.host, options.port)
        # Here and not on top: what can be refused above is refused at once.
        from workers.engines.native.server import EngineServer

        async def serve() -> None:
            await EngineServer(options, shape, token).run(listener)

        asyncio.run(serve())
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2
    return 0


if __name__ == "__main__":
    # Without interpreter teardown: a model thread inside torch would make it hang or abort.
    status = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)
