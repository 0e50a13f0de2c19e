"""The rules of the house, read from the source: who imports whom, how large things are."""

import ast
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("models", "configs", "activities", "workflows", "workers")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
FORBIDDEN_STEMS = frozenset(("utils", "util", "common", "helpers", "helper", "misc"))
BROAD_EXCEPTS_ALLOWED = {
    "activities/rollout/group_loop.py": "group-attempt boundary: an unknown error is raised later",
    "activities/verifiers/gym_worker.py": "process entry: whatever a scorer raises is its verdict",
    "workers/cli/app.py": "process entry: turns any error into an exit code",
    "workers/control.py": "process entry of the control worker",
    "workers/engines/native/model_thread.py": "thread entry: hands any error to those who wait",
    "workers/gpu.py": "process entry of the GPU worker",
    "workers/trainers/rank_process.py": "process entry of a trainer's rank: its last words",
    "workers/tracking/background.py": "tracker sink: a dashboard never stops a run",
}
"""Where ``except Exception`` may stand, each with its reason. Anything else names its errors."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def product_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def parsed() -> Iterator[tuple[str, ast.Module, str]]:
    for path in product_files():
        text = path.read_text()
        yield path.relative_to(ROOT).as_posix(), ast.parse(text), text


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type
    if caught is None:
        return True
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(isinstance(n, ast.Name) and n.id in ("Exception", "BaseException") for n in names)


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether the handler can end without raising; cleaning up and re-raising is no swallowing."""
    last = handler.body[-1]
    return not (isinstance(last, ast.Raise) and last.exc is None)


def test_import_order_and_third_parties_hold() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "lint-imports"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_distribution_claims_the_package(package: str) -> None:
    """An editable install lists no packages, a wheel lists them under ``perdure``."""
    assert set(packages_distributions().get(package, ())) <= {"perdure"}


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_imported_from_this_checkout(package: str) -> None:
    code = f"import {package}; print({package}.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == ROOT / package / "__init__.py"


def test_no_module_is_named_after_nothing() -> None:
    nameless = [path for path in product_files() if path.stem in FORBIDDEN_STEMS]
    assert not nameless, f"name these after what they are: {nameless}"


def test_files_stay_readable() -> None:
    long = {name: text.count("\n") for name, _, text in parsed()}
    assert not {name: lines for name, lines in long.items() if lines > MAX_FILE_LINES}


def test_functions_stay_readable() -> None:
    long = {
        f"{name}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, tree, _ in parsed()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    }
    assert not {name: lines for name, lines in long.items() if lines > MAX_FUNCTION_LINES}


def test_broad_excepts_stand_only_where_a_reason_is_listed() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree, _ in parsed()
        if name not in BROAD_EXCEPTS_ALLOWED
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and is_broad(node) and swallows(node)
    ]
    assert not found, f"name the errors, or list the file with its reason: {found}"


def test_every_file_and_public_class_says_what_it_is() -> None:
    silent = [name for name, tree, text in parsed() if text and ast.get_docstring(tree) is None]
    silent += [
        f"{name}:{node.lineno} {node.name}"
        for name, tree, _ in parsed()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
    ]
    assert not silent


def test_workflow_code_reads_no_clock_and_no_chance() -> None:
    """Time and randomness in a workflow must come from its history."""
    forbidden = {"time", "random", "datetime.now", "uuid", "os", "asyncio.sleep"}
    found = []
    for name, tree, _ in parsed():
        if not name.startswith("workflows/"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [f"{name}: {a.name}" for a in node.names if a.name in forbidden]
            elif isinstance(node, ast.ImportFrom) and node.module in forbidden:
                found.append(f"{name}: {node.module}")
    assert not found
