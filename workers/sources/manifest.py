"""``prepared/data/manifest.json``: what the prepared data was made from. Immutable once written."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from activities.storage import layout
from activities.storage.store import Store
from models.base import Carried
from models.errors import ConfigurationError


class DataManifest(Carried):
    """Written last in its folder: without it the folder does not count."""

    schema_version: int = 1
    contract: dict[str, Any]
    """The part of the run file, and the tokenizer files' digests, that decide the rows."""
    inputs: dict[str, str]
    """Run-file key of a data file -> SHA-256 of its content."""
    outputs: dict[str, str]
    """Name of a file of the folder -> SHA-256."""
    rows: dict[str, int]
    """Split -> number of rows."""
    provenance: dict[str, Any]
    """For people: paths and generator versions. Not compared."""


def read_manifest(store: Store) -> DataManifest:
    """The manifest of ``prepared/data``; ``ConfigurationError`` when missing or unreadable."""
    where = f"{store.root}/{layout.MANIFEST_JSON}"
    try:
        return DataManifest.model_validate_json(store.read_bytes(layout.MANIFEST_JSON))
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{where} is missing; Perdure adopts no prepared data of unknown origin: remove the "
            "folder or choose another output.root"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{where} is not a manifest: {error}") from error


def require_unchanged(
    store: Store, manifest: DataManifest, contract: Mapping[str, Any], inputs: Mapping[str, str]
) -> None:
    """Refuse prepared data that was made from something else, or altered since.

    Raises:
        ConfigurationError: naming what changed, and both digests.
    """
    folder = f"{store.root}/{layout.PREPARED_DATA}"
    recorded, wanted = dict(manifest.contract), _plain(contract)
    if recorded != wanted:
        changes = "; ".join(_changes(dict(_flat(recorded)), dict(_flat(wanted))))
        raise ConfigurationError(
            f"{folder} is immutable and was prepared from another configuration: {changes} "
            f"(contract SHA-256 recorded {_digest(recorded)}, now {_digest(wanted)}); choose "
            "another output.root for a new run"
        )
    for key in sorted({*manifest.inputs, *inputs}):
        before, now = manifest.inputs.get(key, "none"), inputs.get(key, "none")
        if before != now:
            raise ConfigurationError(
                f"the file of {key} changed since {folder} was prepared: recorded SHA-256 "
                f"{before}, now {now}; restore it, or choose another output.root for a new run"
            )
    for name, before in sorted(manifest.outputs.items()):
        path = f"{layout.PREPARED_DATA}/{name}"
        now = store.sha256(path) if store.exists(path) else "none (missing)"
        if before != now:
            raise ConfigurationError(
                f"{folder}/{name} was altered: recorded SHA-256 {before}, found {now}; restore it, "
                "or choose another output.root for a new run"
            )


def _changes(recorded: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    for key in sorted({*recorded, *wanted}):
        before, now = recorded.get(key, "absent"), wanted.get(key, "absent")
        if before != now:
            yield f"{key} was {before}, is {now}"


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested objects and lists with dotted names."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        yield prefix, value
        return
    for key, item in items:
        yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """``value`` as it would come back from JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
