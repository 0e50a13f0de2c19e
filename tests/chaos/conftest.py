"""One warmed-up tiny model and one stack for all kill tests of a session."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_harness import Stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """A stack of its own on free ports; stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="perdure-chaos-", dir="/tmp") as folder:
        stack = Stack(Path(folder))
        stack.up()
        yield stack
        stack.down()


@pytest.fixture(scope="session")
def tiny_model(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 287 k parameter model that reverses three letters in one try out of five."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    done = stack.perdure(
        *("model", "tiny", "--out", str(folder), "--letters", "3", "--hidden-size", "96"),
        *("--num-layers", "2", "--warmup-accuracy", "0.2"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
