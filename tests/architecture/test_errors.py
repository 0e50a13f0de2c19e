"""The error tree: drawn, picklable, and with one Temporal type string a class."""

import ast
import pickle
import re
from pathlib import Path

import pytest

import models.errors
from models.errors import PerdureError, all_errors, fatal_type_names

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("models", "configs", "activities", "workflows", "workers")


def leaves() -> list[type[PerdureError]]:
    return [error for error in all_errors() if error is not PerdureError]


def drawn_names() -> set[str]:
    """Class names of the tree in the module's docstring."""
    drawing = (models.errors.__doc__ or "").split("\n\n")[1]
    return set(re.findall(r"^[│├└─ ]*(\w+)", drawing, flags=re.MULTILINE))


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: error.__name__)
def test_error_survives_pickling_with_its_message(error: type[PerdureError]) -> None:
    original = error("update 3: it broke")
    copy = pickle.loads(pickle.dumps(original))
    assert type(copy) is error
    assert copy.message == "update 3: it broke"
    assert str(copy) == "update 3: it broke"
    assert copy.retryable is error.retryable


def test_extra_fields_survive_pickling() -> None:
    copy = pickle.loads(pickle.dumps(models.errors.GenerationFault("late", "timeout")))
    assert copy.category == "timeout"


def declared_errors() -> dict[str, str]:
    """Class name -> place of every subclass of the tree, read from the source of all packages.

    Read and not imported, so that the answer does not depend on what other tests loaded.
    """
    classes = [
        (node, path.relative_to(ROOT).as_posix())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    found = {"PerdureError": "models/errors.py"}
    while True:
        more = {
            node.name: f"{place}:{node.lineno}"
            for node, place in classes
            if any(isinstance(base, ast.Name) and base.id in found for base in node.bases)
        }
        if more.keys() <= found.keys():
            return found
        found |= more


def test_every_error_is_drawn() -> None:
    undrawn = {n: place for n, place in declared_errors().items() if n not in drawn_names()}
    assert not undrawn, f"declare and draw these in models/errors.py: {undrawn}"


def test_every_drawn_error_exists() -> None:
    assert drawn_names() <= declared_errors().keys()


def test_type_strings_are_unique() -> None:
    names = [error.type_name() for error in all_errors()]
    assert len(names) == len(set(names))


def test_only_an_unreachable_service_and_a_group_attempt_may_be_tried_again() -> None:
    retryable = {error.__name__ for error in leaves() if error.retryable}
    assert retryable == {"ServiceUnreachable", "GenerationFault"}
    assert not retryable & set(fatal_type_names())
