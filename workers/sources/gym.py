"""reasoning-gym as a stream of entries, and the key under which an entry is split.

reasoning-gym is an optional extra: it is imported when a task names it, never before.
"""

import difflib
import importlib.metadata
import json
import math
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from models.errors import ConfigurationError

# Generators are lazy: an index costs nothing until it is read. Some fix their choices by size, so
# the size must not depend on how many questions are asked for.
_STREAM_SIZE = 1_000_000

_ORDERLESS_NUMBERS = frozenset(("gcd", "lcm"))
_PRODUCT = re.compile(r"\d+(?: \* \d+)+")
_SUM = re.compile(r"\d+(?: \+ \d+)+")


def gym_entries(name: str, seed: int, params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Entries {question, answer, metadata} of generator ``name``, plain JSON values only.

    The answer is null where the generator has no single right one and scores by its own rule.

    Raises ``ConfigurationError`` when the extra is missing, the name is unknown (with near names),
    or the generator refuses ``params``.
    """
    dataset = _dataset(_reasoning_gym(), name, seed, params)
    return (_plain(name, dataset[index]) for index in range(_STREAM_SIZE))


def gym_key(name: str, entry: dict[str, Any]) -> str:
    """The question text, or the sorted operands when their order does not matter."""
    metadata = entry["metadata"]
    expression = metadata.get("expression")
    if isinstance(expression, str):
        for pattern, sign in ((_PRODUCT, " * "), (_SUM, " + ")):
            if pattern.fullmatch(expression):
                return sign.join(sorted(expression.split(sign), key=int))
    numbers = metadata.get("numbers")
    if name in _ORDERLESS_NUMBERS and isinstance(numbers, list):
        return f"{name} {sorted(numbers)}"
    return str(entry["question"])


def gym_version() -> str:
    """Version of the installed reasoning-gym."""
    return importlib.metadata.version("reasoning-gym")


def _reasoning_gym() -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigurationError(
            f"data.tasks: gym:* tasks need reasoning-gym ({error}); install the extra perdure[gym]"
        ) from error
    return reasoning_gym


def _dataset(gym: ModuleType, name: str, seed: int, params: dict[str, Any]) -> Any:
    reserved = sorted({"seed", "size"} & set(params))
    if reserved:
        raise ConfigurationError(
            f"data.tasks: gym:{name} params.{reserved[0]} is set by data.seed and the counts; "
            "remove it"
        )
    known = gym.factory.DATASETS
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigurationError(f"data.tasks: reasoning-gym has no generator {name!r}{hint}")
    try:
        return gym.create_dataset(name, seed=seed, size=_STREAM_SIZE, **params)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigurationError(f"data.tasks: gym:{name} refuses params: {error}") from error


def _plain(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """The entry as JSON holds it: tuples become lists, other objects their text."""
    if not isinstance(entry.get("question"), str) or not entry["question"]:
        raise ConfigurationError(
            f"data.tasks: gym:{name} made an entry whose question is {entry.get('question')!r}; "
            "choose another generator"
        )
    kept = {key: entry[key] for key in ("question", "answer", "metadata")}
    plain: dict[str, Any] = json.loads(json.dumps(_finite(kept), default=str))
    return plain


def _finite(value: Any) -> Any:
    """``value`` with text keys and without numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
