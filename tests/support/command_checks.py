"""Commands of the documents that no test types, each with its reason and with another check."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import typer
import yaml
from documents import ROOT, blocks

from workers.cli.app import app, run_command

VERBS = ("up", "build", "exec", "down")
COMPOSE_OPTIONS = ("-d", "--no-deps", "--profile")


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


def _words_are_taken(command: str) -> None:
    line = re.sub(r"^([A-Z_]+=\S+ )+", "", command.partition(" > ")[0])
    assert line.startswith("perdure "), command
    assert not (answer := parsed(line)), answer


def _run_file_is_valid(command: str) -> None:
    """Of a ``run`` of a recipe, or of the README's run file."""
    _words_are_taken(command)
    (mine,) = (each for each in blocks(ROOT / "README.md", "toml") if 'name = "mine"' in each)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.toml").write_text(mine)
        (Path(folder) / "configs").symlink_to(ROOT / "configs")
        said = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stderr(said):
            assert run_command(["validate", *shlex.split(command)[2:]]) == 0, said.getvalue()


def _script_parses(command: str) -> None:
    words = shlex.split(command)
    script = ROOT / words[0]
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True, timeout=10)
    for word in words[1:]:
        known = (ROOT / word).exists() or word.isdigit() or word in ("-k", "loss")
        assert known or re.search(rf"(?<![\w-]){word}(?![\w-])", script.read_text()), word


def _tasks_exist(command: str) -> None:
    tasks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["poe"]["tasks"]
    for line in command.split(";"):
        program, task = shlex.split(line)
        assert program == "poe"
        assert task in tasks


def _hooks_exist(_command: str) -> None:
    assert yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]


def _environment_is_made(_command: str) -> None:
    assert "-m venv" in (ROOT / "scripts/environment").read_text()


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
        elif word == "perdure":
            inner = shlex.join([word, *rest])
            assert not (answer := parsed(inner)), answer
            for path in re.findall(r"/src/(\S+)", inner):
                assert (ROOT / path).exists()
        else:
            assert word in (*VERBS, *COMPOSE_OPTIONS, *services), word


def _temporal_takes_it(command: str) -> None:
    program = Path(sys.executable).parent / "temporal"
    words = [*shlex.split(command)[1:], "--help"]  # an unknown option is an error all the same
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


EXCEPTIONS: list[tuple[str, str, Callable[[str], None]]] = [
    (r"scripts/test.*", "runs this test", _script_parses),
    (r"scripts/gpu_.*", "needs GPUs, or minutes", _script_parses),
    (r"scripts/quickstart --tiny", "trains for minutes", _script_parses),
    (r"poe .*", "runs this test, or for minutes", _tasks_exist),
    (r"pre-commit install", "changes the git folder of whoever tests", _hooks_exist),
    (r"\. \.venv/bin/activate", "the environment of whoever tests", _environment_is_made),
    (r"docker .*", "needs a Docker engine", _images_and_services_exist),
    (r"temporal .*", "asks a server at the default address", _temporal_takes_it),
    (r"perdure doctor services .*", "asks a service that runs code", _words_are_taken),
    (r"perdure codec-server.*", "serves until it is ended", _words_are_taken),
    (r"(\w+=\S+ )*perdure worker .*", "serves until it is ended", _words_are_taken),
    (r"perdure run .*", "would be another run, of minutes", _run_file_is_valid),
    (r"perdure cancel .*", "ends the run, as the stop that is typed", _words_are_taken),
    (r"perdure gpu-usage .*", "needs a GPU, and takes three hours", _words_are_taken),
    (r"perdure doctor gpu .*", "fails without a GPU", _words_are_taken),
    (r"perdure evaluation resubmit .*", "needs an evaluation in background", _words_are_taken),
]
"""Pattern of the whole command, why it is not typed, and what is checked of it instead."""
