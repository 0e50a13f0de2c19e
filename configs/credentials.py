"""What credentials look like and how they are called. A run file may hold none.

A run file is kept under the output root, sent to Temporal and shown on pages: whatever it holds is
read by everybody who may look at the run.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "[redacted]"

_NAMES = frozenset(("authorization", "password", "passwd", "secret", "token", "credentials"))
_SUFFIXES = (
    "_token",
    "_api_key",
    "_apikey",
    "_password",
    "_passwd",
    "_passphrase",
    "_secret",
    "_secret_key",
    "_private_key",
    "_access_key",
    "_credential",
    "_credentials",
)
_BEARING = r"""
      (?P<before>
          ://(?=[^\s/@:]*:[^\s/@]*@)                                   # user and password of a URL
        | [?&][\w.-]{0,40}(?:token|secret|signature|password|credential|api_?key)[\w.-]{0,40}=
        | \b(?:bearer|basic)\s+(?=[\w.~+/=-]{12})
      )
      (?:(?<=://)[^\s/@]+ | [^\s&"'<>]+)
    | \b(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|xox[abprs]-|(?-i:AKIA|ASIA|AIza))[A-Za-z0-9_-]{12,}
    | \beyJ[\w-]{8,4000}\.[\w-]{8,4000}\.[\w-]+                         # a JSON web token
    | -----BEGIN[A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[A-Z ]*-----|\Z)
"""
_ASSIGNED = r"""
    (?P<name>
        \b[a-z][a-z0-9_]*_(?:token|api_key|password|secret|private_key|access_key)["']?\s*[=:]\s*["']?
    )
    [^\s&"'<>]+
"""
_FLAGS = re.VERBOSE | re.IGNORECASE | re.DOTALL
_SHAPES = re.compile(_BEARING, _FLAGS)
_ASSIGNMENTS = re.compile(_ASSIGNED, _FLAGS)


def names_credential(name: str) -> bool:
    """Whether a key or a variable is called like something secret, in letters of any case."""
    lower = name.lower().replace("-", "_")
    return lower in _NAMES or f"_{lower}".endswith(_SUFFIXES)


def without_credentials(text: str, *, assigned: bool = True) -> str:
    """``text`` with a mark in the place of whatever looks like a credential.

    ``assigned``: also of what stands behind a name like ``my_token =``.
    """
    text = _SHAPES.sub(lambda found: f"{found['before'] or ''}{HIDDEN}", text)
    return _ASSIGNMENTS.sub(rf"\g<name>{HIDDEN}", text) if assigned else text


def credentials_in(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the texts in a document that hold what looks like a credential."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from credentials_in(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from credentials_in(inner, f"{path}[{index}]")
    elif isinstance(value, str) and without_credentials(value) != value:
        yield path
