"""Whether two resolved run files mean the same, and in which keys they differ.

A file that an older version recorded lacks the keys that came since. It meant their defaults, so it
is resolved again before it is compared.
"""

from collections.abc import Mapping
from typing import Any

from configs.load import (
    MAY_CHANGE_BETWEEN_ATTEMPTS,
    Loaded,
    comparable_sha256,
    resolve_document,
)
from models.errors import ConfigurationError

_SHOWN = 5


def recorded_document(recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    """``recorded`` with every key of this version; itself when this version refuses it."""
    try:
        return resolve_document(recorded, origin="recorded run file").document
    except ConfigurationError:
        return recorded


def recorded_identity(recorded: Mapping[str, Any]) -> str:
    """``Loaded.identity`` of a run file that was recorded earlier."""
    return comparable_sha256(recorded_document(recorded))


def differences(recorded: Mapping[str, Any], loaded: Loaded) -> str:
    """Dotted names of the first keys that differ, for a message."""
    before = recorded_document(recorded)
    names = [
        f"{table}.{key}" if isinstance(now, dict) else table
        for table, now in loaded.document.items()
        for key in (now if isinstance(now, dict) else (table,))
        if _differs(before.get(table), now, key)
        and not (table == "launch" and key in MAY_CHANGE_BETWEEN_ATTEMPTS)
    ]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more or "keys that this version does not know"


def _differs(before: Any, now: Any, key: str) -> bool:
    if isinstance(now, dict):
        return not isinstance(before, dict) or before.get(key) != now[key]
    return bool(before != now)
