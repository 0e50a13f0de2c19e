"""What must not leave a run with its report: credentials, wherever they stand.

Three nets: values that are known (those of ``launch.env``, and of variables of this process that
are named like credentials), fields that are named like credentials, and text that looks like one.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from configs.launch import CREDENTIAL_SUFFIXES

HIDDEN = "[redacted]"
_LEAST_KNOWN_CHARS = 6
"""Of a known value: a shorter one (``1``, ``true``) would be found everywhere."""

_NAMES = frozenset(("authorization", "password", "passwd", "secret", "token", "credentials"))
_SUFFIXES = tuple(suffix.lower() for suffix in CREDENTIAL_SUFFIXES)
_SHAPES = re.compile(
    r"""
      (?P<before>
          ://(?=[^\s/@:]*:[^\s/@]*@)                                   # user and password of a URL
        | [?&][\w.-]{0,40}(?:token|secret|signature|password|credential|api_?key)[\w.-]{0,40}=
        | \b(?:bearer|basic)\s+(?=[\w.~+/=-]{12})
        | \b[a-z][a-z0-9_]*_(?:token|api_key|password|secret|private_key|access_key)
          ["']?\s*[=:]\s*["']?
      )
      (?:(?<=://)[^\s/@]+ | [^\s&"'<>]+)
    | \b(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|xox[abprs]-|(?-i:AKIA|ASIA|AIza))[A-Za-z0-9_-]{12,}
    | \beyJ[\w-]{8,4000}\.[\w-]{8,4000}\.[\w-]+                         # a JSON web token
    | -----BEGIN[A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[A-Z ]*-----|\Z)
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)


class Redactor:
    """Hides credentials in text and in JSON documents."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        values = sorted({value for value in known if len(value) >= _LEAST_KNOWN_CHARS}, key=len)
        self._known = re.compile("|".join(map(re.escape, reversed(values)))) if values else None

    def text(self, value: str) -> str:
        """``value`` with credentials replaced by a mark."""
        if self._known is not None:
            value = self._known.sub(HIDDEN, value)
        return _SHAPES.sub(lambda found: f"{found['before'] or ''}{HIDDEN}", value)

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
    process = (value for name, value in os.environ.items() if name.endswith(CREDENTIAL_SUFFIXES))
    return Redactor([*(value for value in own if isinstance(value, str)), *process])


def _is_secret(path: str) -> bool:
    name = path.rpartition(".")[2].lower()
    return "launch.env." in f"{path}." or name in _NAMES or f"_{name}".endswith(_SUFFIXES)
