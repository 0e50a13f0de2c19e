"""``python -m workers`` and the console script ``perdure``: the same program."""

import os
import sys

import structlog

from workers.cli.app import run_command


def main() -> None:
    """Run the command line and leave with its exit code.

    ``os._exit``, because a process that used the Temporal SDK may abort while Python finalizes.
    """
    # Standard output belongs to results; structlog's default would write there.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    code = run_command(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
