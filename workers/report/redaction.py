"""What must not leave a run with its report: credentials, wherever they stand.

Three nets: values that are known (those of ``launch.env``, and of variables of this process that
are named like credentials), fields that are named like credentials, and text that looks like one.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from configs.credentials import HIDDEN, names_credential, without_credentials

_LEAST_KNOWN_CHARS = 6
"""Of a known value: a shorter one (``1``, ``true``) would be found everywhere."""


class Redactor:
    """Hides credentials in text and in JSON documents."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        values = sorted({value for value in known if len(value) >= _LEAST_KNOWN_CHARS}, key=len)
        self._known = re.compile("|".join(map(re.escape, reversed(values)))) if values else None

    def text(self, value: str) -> str:
        """``value`` with credentials replaced by a mark."""
        if self._known is not None:
            value = self._known.sub(HIDDEN, value)
        return without_credentials(value)

    def document(self, value: Any, path: str = "") -> Any:
        """A JSON document, its keys kept. ``launch.env`` shows names only."""
        if isinstance(value, Mapping):
            return {
                key: self.document(inner, f"{path}.{key}" if path else str(key))
                for key, inner in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.document(inner, path) for inner in value]
        if isinstance(value, str):
            return HIDDEN if value and _is_secret(path) else self.text(value)
        return value


def redactor_of(config: Any) -> Redactor:
    """The one for a run whose resolved run file is ``config`` (anything, if it was damaged)."""
    launch = config.get("launch") if isinstance(config, dict) else None
    env = launch.get("env") if isinstance(launch, dict) else None
    own = env.values() if isinstance(env, dict) else ()
    process = (value for name, value in os.environ.items() if names_credential(name))
    return Redactor([*(value for value in own if isinstance(value, str)), *process])


def _is_secret(path: str) -> bool:
    return "launch.env." in f"{path}." or names_credential(path.rpartition(".")[2])
