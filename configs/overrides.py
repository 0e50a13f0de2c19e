"""``--set table.key=VALUE``: one value of the run file, replaced before validation."""

import copy
import re
import tomllib
from collections.abc import Iterable
from typing import Any

from configs.credentials import HIDDEN, names_credential, without_credentials
from models.errors import ConfigurationError

_PART = re.compile(r"[a-z][a-z0-9_]*")
_MEANT = {
    "true": "write true",
    "false": "write false",
    **dict.fromkeys(
        ("none", "null"),
        "TOML has no empty value; take the key out of the file to get its default",
    ),
}
"""What other languages call a value, in lower case, and what to write instead."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def apply_overrides(document: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return ``document`` with every override applied in order; the last one of a key wins.

    Lists are replaced whole. Tables that the document lacks are made.

    Raises:
        ConfigurationError: an override is malformed or goes through something that is no table.
    """
    result = copy.deepcopy(document)
    for text in overrides:
        path, value = parse_override(text)
        table = result
        for depth, part in enumerate(path[:-1], start=1):
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigurationError(
                    f"--set {_shown(text)}: {'.'.join(path[:depth])} is not a table; "
                    "lists and values are replaced whole"
                )
            table = inner
        table[path[-1]] = value
    return result


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Split ``table.key=VALUE`` into the key's path and the value, read as TOML.

    Raises:
        ConfigurationError: no ``=``, a key outside the grammar, or a value that is not TOML.
    """
    key, separator, literal = text.partition("=")
    if not separator:
        raise ConfigurationError(f"--set {_shown(text)}: write table.key=VALUE")
    path = tuple(key.strip().split("."))
    if not _is_valid_path(path):
        raise ConfigurationError(
            f"--set {_shown(text)}: {key.strip()!r} is not a key; keys are lower-case words joined "
            "by dots (launch.env.NAME may end in capitals)"
        )
    return path, _parse_value(text, key.strip(), literal.strip())


def _shown(text: str) -> str:
    """An override in a message: without what looks like, or is called like, a credential."""
    key, separator, value = text.partition("=")
    if names_credential(key.strip().rpartition(".")[2]):
        return f"{key}{separator}{HIDDEN}"
    return f"{key}{separator}{without_credentials(value)}"


def _is_valid_path(path: tuple[str, ...]) -> bool:
    if path[:2] == ("launch", "env") and len(path) == 3:
        return _ENV_NAME.fullmatch(path[2]) is not None
    return all(_PART.fullmatch(part) for part in path)


def _parse_value(text: str, key: str, literal: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {literal}\n")
    except tomllib.TOMLDecodeError:
        parsed = {}
    if set(parsed) != {"value"}:
        told = _shown(text)
        value = told.partition("=")[2].strip()
        meant = _MEANT.get(literal.lower())
        if meant is not None:
            raise ConfigurationError(f"--set {told}: {value!r} is not a TOML value; {meant}")
        text_value = value.replace('"', "").replace("'", "")
        raise ConfigurationError(
            f"--set {told}: {value!r} is not a TOML value; quote text as in "
            f"--set '{key}=\"{text_value}\"', leave numbers, true and false bare"
        )
    return parsed["value"]
