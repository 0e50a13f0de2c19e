"""Ties a child process to its parent: ``python leash.py PARENT_PID COMMAND ...``.

Asks the kernel to kill this process when its parent ends, then becomes COMMAND. Done here rather
than between fork and exec of the parent, which has threads and must not run Python code there.
Standard library only: it runs isolated, before any package is importable.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Replace this process by the command in ``arguments[1:]``."""
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"parent {parent} ended before {command[0]} could start")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
