"""Command line of the supervisor."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from configs.inference import Argument
from models.errors import ConfigurationError
from workers.engines.arguments import positive_seconds

START_TIMEOUT_S = 900.0
"""Longer than a first start that compiles kernels; the caller's own deadline comes before it."""


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that the supervisor is told at start."""

    arguments: dict[str, Argument]
    """Of the server, by SGLang's names with underscores; ``model_path`` is among them."""
    host: str
    port: int
    ready_file: Path | None
    start_timeout_s: float
    exit_with_parent: bool


def build_parser() -> argparse.ArgumentParser:
    """The argument parser."""
    parser = argparse.ArgumentParser(prog="python -m workers.engines.sglang")
    add = parser.add_argument
    add("--arguments", required=True, help="JSON object: SGLang's arguments, names_like_this")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0 picks a free port; read it from the ready file")
    add("--ready-file", type=Path, help="JSON {port, pid, url}, written when serving")
    add("--start-timeout", dest="start_timeout_s", type=positive_seconds, default=START_TIMEOUT_S)
    add("--exit-with-parent", action="store_true", help="stop when the parent process ends")
    return parser


def parse_options(arguments: list[str]) -> Options:
    """Parse the command line. Exits with status 2 on a usage error, as argparse does.

    Raises:
        ConfigurationError: ``--arguments`` is no JSON object with a ``model_path``.
    """
    given = vars(build_parser().parse_args(arguments))
    text = given.pop("arguments")
    try:
        server = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"--arguments is no JSON: {error}") from error
    if not isinstance(server, dict) or not isinstance(server.get("model_path"), str):
        raise ConfigurationError("--arguments must be a JSON object that names a model_path")
    return Options(arguments=server, **given)
