"""Loading a run file: defaults < file < ``--set``, resolved once, with a digest.

The resolved document is the run's identity: two runs with equal ``comparable_sha256`` mean the
same run. Every problem is a ``ConfigurationError`` that names file, key, value and reason.
"""

import hashlib
import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.checks import find_problems
from configs.explain import explain
from configs.hints import nearest
from configs.overrides import apply_overrides
from configs.paths import with_absolute_paths
from configs.problem import Problem, configuration_error, dotted
from configs.run import RunSpec
from models.errors import ConfigurationError

MAY_CHANGE_BETWEEN_ATTEMPTS = ("auto_resume", "max_retries", "max_recoveries", "timeout_s")
"""Keys of ``[launch]`` that say how often and how long to try, not what the run is."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A run file, checked and resolved."""

    spec: RunSpec
    document: dict[str, Any]
    """The resolved run file: every key present, paths absolute, plain JSON."""
    sha256: str
    """Digest of ``document``."""
    path: str
    """Where it came from, for messages."""

    @property
    def identity(self) -> str:
        """Digest of what the run means: equal for two attempts at the same run."""
        return comparable_sha256(self.document)


def load_run(path: str | Path, overrides: Iterable[str] = ()) -> Loaded:
    """Read, override, check and resolve a run file.

    Args:
        path: TOML, or JSON when the name ends in ``.json``.
        overrides: ``table.key=VALUE`` texts, the value as TOML.

    Raises:
        ConfigurationError: anything that is wrong, all of it in one message.
    """
    origin = str(path)
    document = read_document(Path(path))
    if "config" in document and "schema_version" not in document:
        raise ConfigurationError(
            f"{origin}: is a workflow's input, as `perdure config render` prints it; the run file "
            "is the table 'config' in it"
        )
    try:
        document = apply_overrides(document, overrides)
    except ConfigurationError as error:
        raise ConfigurationError(f"{origin}: {error.message}") from None
    return resolve_document(document, origin=origin, folder=Path(path).absolute().parent)


def resolve_document(
    document: Mapping[str, Any], *, origin: str, folder: Path | None = None
) -> Loaded:
    """Check a run file that is in memory already and resolve it.

    Resolving a resolved document again gives the same document and digest.

    Args:
        document: the raw or resolved run file.
        origin: what to call it in messages.
        folder: what relative paths are relative to; without one they are refused, because a
            worker's current directory is nobody's intention.
    """
    _refuse_non_json(document, origin)
    try:
        # JSON mode, because strict Python mode refuses the lists that TOML arrays become.
        spec = RunSpec.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise configuration_error(origin, explain(error)) from None
    spec = with_absolute_paths(spec, folder, origin)
    problems = find_problems(spec)
    if problems:
        raise configuration_error(origin, problems)
    resolved = spec.model_dump(mode="json")
    return Loaded(spec, resolved, document_sha256(resolved), origin)


def read_document(path: Path) -> dict[str, Any]:
    """Parse a TOML or JSON file whose top level is a table."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(f"{path}: no such file{_similar_file(path)}") from None
    except IsADirectoryError:
        raise ConfigurationError(f"{path}: is a folder, not a run file") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        if path.suffix == ".json":
            document = json.loads(text, object_pairs_hook=_unique_keys)
        else:
            document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: malformed TOML: {error}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path}: malformed JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path}: the top level must be a table")
    return document


def resolve_input(config: Mapping[str, Any], sha256: str, origin: str, remedy: str) -> Loaded:
    """The run file that came as a workflow's input.

    Args:
        config: the document; empty when the input has none.
        sha256: what it is said to be; empty when nothing is said.
        origin: its path, for messages; may be empty.
        remedy: the command that makes such an input.

    Raises:
        ConfigurationError: no document, a wrong one, or another one than is said.
    """
    origin = origin or "config"
    if not config:
        raise ConfigurationError(f"the workflow input has no 'config'; make one with: {remedy}")
    loaded = resolve_document(config, origin=origin)
    # An older version rendered fewer keys; its document is intact and means their defaults.
    if sha256 and sha256 not in (loaded.sha256, document_sha256(config)):
        raise ConfigurationError(
            f"{origin}: config_sha256 is {sha256}, but config resolves to {loaded.sha256}; render "
            "the run file again"
        )
    return loaded


def document_sha256(document: Mapping[str, Any]) -> str:
    """SHA-256 of the document as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def comparable_sha256(document: Mapping[str, Any]) -> str:
    """``document_sha256`` without the keys that may differ between attempts at one run."""
    launch = {
        key: value
        for key, value in document.get("launch", {}).items()
        if key not in MAY_CHANGE_BETWEEN_ATTEMPTS
    }
    return document_sha256({**document, "launch": launch})


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ValueError(f"key {repeated[0]!r} appears twice in one table")
    return dict(pairs)


def _similar_file(path: Path) -> str:
    try:
        names = [entry for entry in os.listdir(path.parent) if entry.endswith((".toml", ".json"))]
    except OSError:
        return ""
    close = nearest(path.name, names)
    return f"; did you mean {path.parent / close}?" if close else ""


def _refuse_non_json(value: Any, origin: str, location: tuple[str | int, ...] = ()) -> None:
    """TOML knows dates, infinities and NaN; JSON, which travels, does not."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _refuse_non_json(inner, origin, (*location, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _refuse_non_json(inner, origin, (*location, index))
    elif isinstance(value, float) and not math.isfinite(value):
        problem = Problem(dotted(location), "must be a finite number", value)
        raise configuration_error(origin, [problem])
    elif value is not None and not isinstance(value, (str, int, float, bool)):
        problem = Problem(
            dotted(location),
            f"a {type(value).__name__} is not accepted anywhere in a run file",
            str(value),
            "write it as text in quotes",
        )
        raise configuration_error(origin, [problem])
