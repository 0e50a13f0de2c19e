"""What arguments the installed SGLang has, read from its source without importing it.

Importing SGLang takes many seconds and wants a GPU; its arguments are the fields of one dataclass
and the ``add_argument`` calls beside it, so a syntax tree tells their names. Their values are
checked by SGLang itself when the server starts.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from configs.hints import nearest
from configs.inference import Argument
from configs.problem import Problem, configuration_error
from models.errors import ConfigurationError

PYTHON_VARIABLE = "PERDURE_SGLANG_PYTHON"
"""Environment variable: the interpreter of an environment that has SGLang; default: this one."""
LOOKUP_TIMEOUT_S = 30.0
"""For an interpreter to start and look for a package."""
_FIND = (
    "from importlib.util import find_spec; found = find_spec('sglang'); "
    "print(found.submodule_search_locations[0] if found else '')"
)


def sglang_python() -> str:
    """The interpreter that runs SGLang's server."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def find_sglang() -> Path | None:
    """Folder of the package that ``sglang_python`` would import; none when it has none.

    Raises:
        ConfigurationError: the interpreter cannot be run.
    """
    python = sglang_python()
    try:
        done = subprocess.run(
            [python, "-c", _FIND],
            capture_output=True,
            text=True,
            timeout=LOOKUP_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(
            f"{python} ({PYTHON_VARIABLE}) cannot be asked for SGLang: {error}"
        ) from error
    found = done.stdout.strip().rpartition("\n")[2]
    return Path(found) if found else None


def require_sglang() -> Path:
    """Folder of the package that ``sglang_python`` would import.

    Raises:
        ConfigurationError: it has none.
    """
    package = find_sglang()
    if package is None:
        raise ConfigurationError(
            f'inference.engine = "sglang": {sglang_python()} has no SGLang; install the extra '
            f"perdure[sglang] there, name another interpreter in {PYTHON_VARIABLE}, or set "
            'inference.engine = "native"'
        )
    return package


def require_arguments(arguments: Mapping[str, Argument]) -> None:
    """Refuse arguments that the installed SGLang does not have, each with the nearest name.

    Raises:
        ConfigurationError: SGLang is not installed, or naming every unknown argument.
    """
    package = require_sglang()
    problems = argument_problems(arguments, package)
    if problems:
        raise configuration_error(str(package), problems)


def argument_problems(arguments: Mapping[str, Argument], package: Path) -> list[Problem]:
    """Every argument that the SGLang in ``package`` does not have, with the nearest that it has."""
    known = argument_flags(package)
    return [_unknown(name, value, known) for name, value in arguments.items() if name not in known]


def argument_flags(package: Path) -> dict[str, str]:
    """Name with underscores -> flag, of every server argument of the SGLang in ``package``.

    Raises:
        ConfigurationError: the source looks like no release that this version of Perdure knows.
    """
    source = package / "srt" / "server_args.py"
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError) as error:
        raise ConfigurationError(f"{source}: no arguments of SGLang to read: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
            return {flag.lstrip("-").replace("-", "_"): flag for flag in _flags(node)}
    raise ConfigurationError(
        f"{source} has no class ServerArgs; Perdure runs SGLang 0.5.17 and 0.5.18"
    )


def _flags(server_args: ast.ClassDef) -> Iterator[str]:
    for node in server_args.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if _has_option(node.annotation):
                yield from _flags_of_field(node.target.id, node.annotation)
        elif isinstance(node, ast.FunctionDef) and node.name == "add_cli_args":
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument":
                    yield from _texts(call.args)


def _has_option(annotation: ast.expr) -> bool:
    """Whether it is ``Annotated``, which SGLang calls A; plain fields are Python's only."""
    if not isinstance(annotation, ast.Subscript):
        return False
    kind = annotation.value
    return isinstance(kind, ast.Name) and kind.id in ("A", "Annotated")


def _flags_of_field(name: str, annotation: ast.expr) -> Iterator[str]:
    told = {
        word.arg: word.value
        for call in ast.walk(annotation)
        if isinstance(call, ast.Call)
        for word in call.keywords
    }
    if "no_cli" in told:
        return
    flag = list(_texts([told["cli_name"]])) if "cli_name" in told else []
    yield from flag or [f"--{name.replace('_', '-')}"]
    if "aliases" in told:
        yield from _texts([told["aliases"]])


def _texts(nodes: list[ast.expr]) -> Iterator[str]:
    """Texts within ``nodes`` that are flags."""
    for node in nodes:
        for leaf in ast.walk(node):
            if isinstance(leaf, ast.Constant) and str(leaf.value).startswith("--"):
                yield str(leaf.value)


def _unknown(name: str, value: Argument, known: Mapping[str, str]) -> Problem:
    close = nearest(name, known)
    return Problem(
        f"inference.sglang.{name}",
        "the installed SGLang has no such argument",
        value,
        f"did you mean {close!r}?" if close else "remove it",
    )
