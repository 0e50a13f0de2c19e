"""``perdure`` without its imports every time: a process that has them forks for each call.

A call is a process of its own, with its own arguments, environment, folder and exit code, as if it
had been started afresh; only Python and the packages are there already. This file as a program
reads one JSON order a line and answers with the exit code.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CLOSE_S = 10
SLOW_IMPORTS = (
    *("activities.analysis.audit", "pyarrow.parquet", "temporalio.client"),
    *("workers.cli.session", "workers.report.page", "torch"),
    *("transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"),
)


class ForkedProgram:
    """Runs ``perdure`` with any arguments, one call after another."""

    def __init__(self, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
            start_new_session=True,
        )

    def run(
        self, arguments: list[str], folder: Path, env: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """The same as a process ``perdure ARGUMENTS`` in ``folder``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            order = {"argv": arguments, "cwd": str(folder), "env": env}
            order |= {"out": out.name, "err": err.name}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, "the forking process ended"
            return subprocess.CompletedProcess(
                ["perdure", *arguments], int(answer), out.read(), err.read()
            )

    def close(self) -> None:
        """End the process, which has no call running."""
        self._process.communicate(timeout=CLOSE_S)


def _become(order: dict[str, Any]) -> None:
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for number, name in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
        os.dup2(os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY), number)
    sys.argv = ["perdure", *order["argv"]]


def _serve() -> None:
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    from workers.__main__ import main  # not for the tests' process, which starts this one

    for line in sys.stdin:
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        _become(json.loads(line))
        main()


if __name__ == "__main__":
    _serve()
