"""The error tree: drawn, picklable, and with one Temporal type string a class."""

import importlib
import pickle
import pkgutil
import re

import pytest

import models.errors
from models.errors import PerdureError, all_errors, fatal_type_names

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


@pytest.mark.parametrize("package", ["models", "configs", "activities", "workflows"])
def test_no_module_adds_an_error_that_is_not_drawn(package: str) -> None:
    """GPU-plane modules are checked by their source elsewhere: they import torch and Ray."""
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
    assert {error.__name__ for error in all_errors()} <= drawn_names()


def test_every_drawn_error_exists() -> None:
    assert drawn_names() == {error.__name__ for error in all_errors()}


def test_type_strings_are_unique() -> None:
    names = [error.type_name() for error in all_errors()]
    assert len(names) == len(set(names))


def test_only_an_unreachable_service_and_a_group_attempt_may_be_tried_again() -> None:
    retryable = {error.__name__ for error in leaves() if error.retryable}
    assert retryable == {"ServiceUnreachable", "GenerationFault"}
    assert not retryable & set(fatal_type_names())
