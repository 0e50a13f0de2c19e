"""Reading a run that may be damaged or going on: what cannot be read becomes a note."""

import math
from collections.abc import Mapping
from typing import Any

from activities.storage.store import Store
from models.errors import PerdureError

Row = dict[str, Any]
_LARGEST = 1e100
"""Nothing that a run measures; larger numbers cannot be drawn."""


class RunFiles:
    """The artifacts of one root. Nothing here raises for a file that is missing or damaged."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.notes: list[str] = []
        """What could not be read, and why."""

    def rows(self, path: str) -> list[Row]:
        """Rows of a JSONL file; none when it is missing."""
        try:
            read = self.store.read_jsonl(path)
        except (OSError, PerdureError, ValueError) as error:
            self.note(path, error)
            return []
        if read.torn_lines:
            self.notes.append(f"{path}: {read.torn_lines} torn lines passed over")
        return read.rows

    def document(self, path: str) -> Row:
        """A JSON object; empty when it is missing."""
        try:
            value = self.store.read_json(path)
        except FileNotFoundError:
            return {}
        except (OSError, PerdureError, ValueError) as error:
            self.note(path, error)
            return {}
        return value if isinstance(value, dict) else {}

    def names(self, folder: str) -> list[str]:
        """Names in a folder; none when it is missing."""
        try:
            return self.store.list(folder)
        except (OSError, PerdureError, ValueError) as error:
            self.note(folder, error)
            return []

    def note(self, what: str, error: Exception) -> None:
        """Remember that ``what`` could not be read."""
        text = error.message if isinstance(error, PerdureError) else str(error)
        first = text.splitlines()[0] if text else type(error).__name__
        self.notes.append(f"{what} cannot be read: {first}")


def number(row: Mapping[str, Any], key: str) -> float | None:
    """The number under ``key`` if it is one that can be drawn; none for anything else."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and abs(value) < _LARGEST else None


def index(row: Mapping[str, Any], key: str) -> int | None:
    """The whole number under ``key``; none for anything else."""
    value = number(row, key)
    return None if value is None else int(value)


def part(row: Mapping[str, Any], key: str) -> Row:
    """The object under ``key``; an empty one for anything else."""
    value = row.get(key)
    return value if isinstance(value, dict) else {}


def parts(row: Mapping[str, Any], key: str) -> list[Row]:
    """The objects in the list under ``key``."""
    value = row.get(key)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
