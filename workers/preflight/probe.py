"""Measurements in a process of their own: one that hangs or crashes is a finding, not an end.

python -m workers.preflight.probe NAME JSON      prints one JSON line
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from models.errors import PerdureError

REASON_LINES = 3
"""Last lines of what a failed probe wrote that go into its finding."""


class ProbeFailed(Exception):
    """A measurement that gave no result; the message says why."""


def run_probe(name: str, argument: Any, timeout_s: float) -> Any:
    """The result of ``PROBES[name](argument)``, computed by a child within ``timeout_s`` seconds.

    The child's whole process group is gone when this returns.

    Raises:
        ProbeFailed: it took too long, crashed or refused.
    """
    command = [sys.executable, "-m", "workers.preflight.probe", name, json.dumps(argument)]
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, process_group=0
        ) as child:
            try:
                told, _ = child.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise ProbeFailed(f"no result within {timeout_s:g} s") from None
            finally:
                _end(child)
        if child.returncode == 0:
            return json.loads(told.strip().rpartition(b"\n")[2])
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()][-REASON_LINES:]
    raise ProbeFailed(" ".join(lines) or f"exit status {child.returncode}")


def _end(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _probes() -> dict[str, Callable[[Any], Any]]:
    """What can be measured, by name. Imported in the child only: all of it needs torch."""
    from workers.preflight.agreement import measure_agreement
    from workers.preflight.ceilings import measure_device
    from workers.preflight.collectives import all_reduce

    return {"ceilings": measure_device, "all_reduce": all_reduce, "agreement": measure_agreement}


def main() -> None:
    """The child."""
    name, argument = sys.argv[1], json.loads(sys.argv[2])
    # What libraries print belongs to the log; the result is the only thing on standard output.
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        result = _probes()[name](argument)
    except PerdureError as error:
        sys.exit(f"{error.message}")
    told.write(json.dumps(result) + "\n")
    told.flush()
    sys.stderr.flush()
    # Threads of libraries may hold up or abort the interpreter's own end.
    os._exit(0)


if __name__ == "__main__":
    main()
