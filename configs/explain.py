"""Schema violations in the words of the run file."""

import re
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from configs.hints import nearest, unknown_key_hint
from configs.problem import Problem, dotted

_KINDS = {
    bool: "true/false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a table",
    type(None): "null",
}
_WANTED = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "text in quotes",
    "model_type": "a table",
    "dict_type": "a table",
    "tuple_type": "a list",
}


_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, '.', '_' and '-'",
    r"^[a-z0-9][a-z0-9._-]*$": "lower-case letters, digits, '.', '_' and '-'",
}
"""Patterns of the schema in words."""
_CHOICES = {"engine_drain": "rolling"}
"""What other trainers call a choice, and what it is called here."""


def explain(error: ValidationError) -> list[Problem]:
    """One problem for each violation, in the order of the schema."""
    return [_problem(details) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails) -> Problem:
    location, kind, value = details["loc"], details["type"], details["input"]
    key = dotted(location)
    if kind == "extra_forbidden":
        *table, name = location
        where = f"[{dotted(table)}]" if table else "the run file"
        return Problem(key, f"unknown key in {where}", value, unknown_key_hint(table, str(name)))
    if kind == "missing":
        return Problem(key, "is required and missing")
    if kind in _WANTED:
        got = _KINDS.get(type(value), type(value).__name__)
        return Problem(key, f"must be {_WANTED[kind]}, not {got}", value)
    if kind == "value_error":
        return Problem(key, str(details["ctx"]["error"]), value)
    if kind == "literal_error":
        return Problem(key, _reason(details), value, _literal_hint(details, value))
    if kind == "string_pattern_mismatch" and details["ctx"]["pattern"] in _PATTERNS:
        allowed = _PATTERNS[details["ctx"]["pattern"]]
        return Problem(key, f"may hold {allowed} only, and begins with a letter or digit", value)
    return Problem(key, _reason(details), value)


def _reason(details: ErrorDetails) -> str:
    return details["msg"].replace("Input should be", "must be").replace("String should", "must")


def _literal_hint(details: ErrorDetails, value: Any) -> str:
    choices = re.findall(r"'([^']*)'", str(details.get("ctx", {}).get("expected", "")))
    if not isinstance(value, str):
        return ""
    known = _CHOICES.get(value)
    close = known if known in choices else nearest(value, choices)
    return f"did you mean {close!r}?" if close else ""
