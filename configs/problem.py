"""One thing that is wrong in a run file, worded for the person who wrote it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from configs.credentials import names_credential, without_credentials
from models.errors import ConfigurationError

_ABSENT = object()
_SECRET_TABLES = ("launch.env",)
_SHOWN_CHARS = 200
"""Of a value: a path without its end would not tell which file is meant."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A key, what it holds, why that cannot be, and what to do instead."""

    key: str
    """Dotted path in the run file, ``data.tasks[0].train_count``; empty for the whole file."""
    reason: str
    value: Any = _ABSENT
    remedy: str = ""

    def __str__(self) -> str:
        subject = self.key
        if subject and self.value is not _ABSENT and not self._is_hidden():
            subject = f"{subject} = {shown(self.value)}"
        text = f"{subject}: {self.reason}" if subject else self.reason
        text = f"{text}; {self.remedy}" if self.remedy else text
        # Names of keys stand before values here, such as experts_per_token.
        return without_credentials(text, assigned=False)

    def _is_hidden(self) -> bool:
        """Whether the value is not to be shown, whatever it looks like. Numbers are no secrets."""
        if self.key.startswith(_SECRET_TABLES):
            return True
        return isinstance(self.value, str) and names_credential(self.key.rpartition(".")[2])


def shown(value: Any) -> str:
    """``value`` as it would be written, short. Tables are not opened: they may hold secrets."""
    if isinstance(value, dict):
        return "{...}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, (dict, list)) for item in value):
        return "[...]"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def dotted(location: Iterable[str | int]) -> str:
    """A path of keys and list indices as text: ``("a", 0, "b")`` is ``a[0].b``."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def configuration_error(origin: str, problems: Iterable[Problem]) -> ConfigurationError:
    """All problems of one file in one error: a line each, every line names the file."""
    return ConfigurationError("\n".join(f"{origin}: {problem}" for problem in problems))
