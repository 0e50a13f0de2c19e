"""Where words go: results on standard output, everything else on standard error."""

import json
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from rich.console import Console


@cache
def out() -> Console:
    """Results for people. Not used with ``--json``."""
    return Console(highlight=False)


@cache
def err() -> Console:
    """Progress, notices and hints."""
    return Console(stderr=True, highlight=False)


def print_json(value: Any, *, indent: int | None = None) -> None:
    """One JSON document on standard output, ending in a newline."""
    sys.stdout.write(json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def notice(text: str) -> None:
    """A line that says what is going on."""
    err().print(text, markup=False, soft_wrap=True)


def quiet_or(show: bool) -> Callable[[str], None]:
    """``notice`` when ``show``, else a function that says nothing."""
    return notice if show else _say_nothing


def equivalent(command: str) -> None:
    """The stock command that does the same: the product stays usable without this one."""
    err().print(f"same as: {command}", style="dim", markup=False, soft_wrap=True)


def _say_nothing(text: str) -> None:
    del text
