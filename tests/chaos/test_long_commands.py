"""Commands of the documents that take minutes, typed in a fresh clone as somebody new would.

Nothing is prepared: the first command makes the environment from the package index. All of them
together take half an hour on two cores.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_checks import LONG
from documents import ROOT
from terminal import Terminal

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2400)]

DEADLINE_S = 2300.0
SAYS = {
    "scripts/quickstart": "train/quickstart: complete, 24 of 24 updates",
    "scripts/quickstart --tiny": "train/tiny: complete, 100 of 100 updates",
    "perdure run configs/recipes/async-cpu.toml": "train/async-cpu: complete, 150 of 150 updates",
}
"""How many updates the recipes ask for."""


@pytest.fixture(scope="module")
def terminal() -> Iterator[Terminal]:
    # Ray's socket paths must stay below 108 characters.
    with tempfile.TemporaryDirectory(prefix="pl-", dir="/tmp") as folder:
        clone = Path(folder) / "perdure"
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True, timeout=60)
        env = {"PERDURE_STATE_DIR": f"{folder}/state"}
        env["PATH"] = f"{clone}/.venv/bin:{os.environ['PATH']}"
        terminal = Terminal(clone, outside() | env, DEADLINE_S)
        yield terminal
        terminal.type("perdure down")


def outside() -> dict[str, str]:
    """The environment without what this session has set for itself."""
    own = ("PYTHON", "PYTEST", "RAY_", "OMP_", "TEMPORAL_", "PERDURE_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)}


@pytest.mark.parametrize("command", ["scripts/quickstart", "scripts/quickstart --tiny", *LONG])
def test_command_is_typed(terminal: Terminal, command: str) -> None:
    done = terminal.type(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAYS.get(command, "") in done.stdout


def test_nothing_in_the_checkout_was_changed(terminal: Terminal) -> None:
    assert terminal.type("git status --porcelain").stdout == ""
