"""Commands of the documents that no test types, each with its reason and with another check."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer
import yaml
from documents import ROOT

from workers.cli.app import app, run_command

VERBS = ("up", "build", "exec", "down")
COMPOSE_OPTIONS = ("-d", "--no-deps", "--profile")
LONG = (
    *("perdure run configs/recipes/async-cpu.toml", "scripts/test tests/unit -k loss"),
    *("poe fmt; poe lint; poe types", "poe schema", "poe reference"),
    "scripts/gpu_scale.sh --cpu 2",
)
"""Typed by ``tests/chaos/test_long_commands.py``, in this order."""


class Instead(NamedTuple):
    """Why a command is not typed, and what is checked of it."""

    reason: str
    check: Callable[[str], None]


def parsed(command: str, *, whole: bool = True) -> str:
    """What ``perdure`` would say against the words of ``command``; empty when it takes them.

    Args:
        command: a line that begins with ``perdure``.
        whole: also the arguments of a verb that is named alone.
    """
    words = shlex.split(command)[1:]
    program = typer.main.get_command(app)
    leaf, rest = program, words
    while rest and rest[0] in (verbs := getattr(leaf, "commands", {})):
        leaf, rest = verbs[rest[0]], rest[1:]
    if not whole and not rest and leaf is not program:
        return ""
    leaf.callback = lambda **_: None
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            program.main(words, prog_name="perdure", standalone_mode=True)
        except SystemExit as leaving:
            return said.getvalue() or "?" if leaving.code else ""
    return ""


def verbs(program: Any = None, *before: str) -> Iterator[str]:
    """Every verb of ``perdure``, with the group that it belongs to."""
    group = program or typer.main.get_command(app)
    for name, verb in group.commands.items():
        if hasattr(verb, "commands"):
            yield from verbs(verb, *before, name)
        else:
            yield " ".join((*before, name))


def validated(run_file: Path) -> str:
    """What ``perdure validate`` says against a run file; empty when it is valid."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = run_command(["validate", str(run_file)])
    return said.getvalue() if code else ""


def _script_parses(command: str) -> None:
    script = ROOT / command
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True, timeout=10)


def _tasks_are_taken(command: str) -> None:
    for line in command.split(";"):
        program, *tasks = shlex.split(line)
        words = [Path(sys.executable).parent / program, "--dry-run", *tasks]
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=30)


def _is_typed_elsewhere(command: str) -> None:
    assert command in LONG


def _images_and_services_exist(command: str) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "build":
        stage = words[words.index("--target") + 1]
        assert re.search(rf"^FROM .* AS {stage}$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        return
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    profiles = {each for service in services.values() for each in service.get("profiles", ())}
    assert words[0] == "compose"
    rest = iter(words[1:])
    for word in rest:
        if word == "--profile":
            assert next(rest) in profiles
        elif word == "cp":
            assert next(rest).endswith(".toml")
            assert next(rest).partition(":")[0] in services
        elif word == "perdure":
            inner = shlex.join([word, *rest])
            assert not (answer := parsed(inner)), answer
            for path in re.findall(r"/src/(\S+)", inner):
                assert (ROOT / path).exists()
        else:
            assert word in (*VERBS, *COMPOSE_OPTIONS, *services), word


EXCEPTIONS = {
    "|".join(map(re.escape, LONG)): Instead("takes minutes", _is_typed_elsewhere),
    r"scripts/test": Instead("runs this test", _script_parses),
    r"poe .*": Instead("runs this test, or kills processes for minutes", _tasks_are_taken),
    r"scripts/(test-contract|setup-sglang-cpu)": Instead("installs SGLang, 3 GB", _script_parses),
    r"scripts/pin": Instead("rewrites the pins of this environment", _script_parses),
    r"docker .*": Instead("needs a Docker engine", _images_and_services_exist),
}
"""Pattern of the whole command -> what is done instead of typing it; the first one counts."""
