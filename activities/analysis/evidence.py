"""What a run's root says about its prompts, read leniently: damage becomes a note, no error."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from activities.storage import layout
from activities.storage.commit import newest_checkpoint, read_cursor, read_marker
from activities.storage.rewinds import read_rewinds
from activities.storage.store import Store
from configs.load import resolve_document
from configs.run import RunSpec
from models.base import Carried
from models.checkpoint import Rewind
from models.errors import ConfigurationError, PerdureError
from models.prompt import DataState
from models.rollout import CollectionManifest

_SIGNS_OF_A_RUN = (
    layout.WORKFLOW_JSON,
    layout.RESOLVED_CONFIG,
    layout.OWNER_JSON,
    layout.ROLLOUTS,
    layout.CHECKPOINT_FOLDERS,
)
_MANIFEST = re.compile(r"(\d{7,})\.e(\d+)\.json")

T = TypeVar("T")


class UpdateRow(Carried):
    """A line of ``updates.jsonl``: one finished optimize."""

    update: int
    epoch: int
    batch_sha256: str
    policy_version: int


@dataclass(frozen=True, slots=True)
class Position:
    """A snapshot of cursor and ledger, with what it counts as consumed."""

    consumed: int
    """Collections up to this index are consumed; -1 at the start of a run."""
    epoch: int
    state: DataState
    source: str
    """The file that says so, relative to the root."""


@dataclass(slots=True)
class Evidence:
    """Everything that an audit reads beside the samples."""

    run_id: str = ""
    rows: list[UpdateRow] = field(default_factory=list)
    """In the order in which they were appended."""
    manifests: dict[tuple[int, int], CollectionManifest] = field(default_factory=dict)
    """(update, epoch) -> manifest."""
    rewinds: list[Rewind] = field(default_factory=list)
    """Oldest first."""
    checkpoint: Position | None = None
    """Of the newest valid checkpoint."""
    steps_per_update: int | None = None
    """Most optimizer steps that one update may take; none when the run file cannot be read."""
    samples_per_prompt: int | None = None
    """Samples of a whole group; none when the run file cannot be read."""
    notes: list[str] = field(default_factory=list)
    """What is missing, torn or unreadable, in words."""

    def try_read(self, what: str, read: Callable[[], T]) -> T | None:
        """The result of ``read``, or none and a note on ``what`` when it cannot be read."""
        try:
            return read()
        except FileNotFoundError:
            self.notes.append(f"{what} is missing")
        except (OSError, ValueError, KeyError, PerdureError) as error:
            self.notes.append(f"{what} cannot be read: {_first_line(error)}")
        return None


def read_evidence(store: Store) -> Evidence:
    """Read the artifacts of a run that may be going on.

    Checkpoint first, then rows, then manifests: what is written meanwhile only adds collections
    that are not trained yet, never an update without its collection.

    Raises:
        ConfigurationError: nothing under the root was written by a run.
    """
    if not any(store.exists(path) for path in _SIGNS_OF_A_RUN):
        raise ConfigurationError(f"{store.root}: holds no run; name the output.root of one")
    evidence = Evidence(rewinds=read_rewinds(store))
    evidence.checkpoint = evidence.try_read("the newest checkpoint", partial(_checkpoint, store))
    _read_rows(store, evidence)
    _read_manifests(store, evidence)
    workflow = evidence.try_read(
        layout.WORKFLOW_JSON, partial(_object, store, layout.WORKFLOW_JSON)
    )
    evidence.run_id = str((workflow or {}).get("run_id", ""))
    spec = evidence.try_read(layout.RESOLVED_CONFIG, partial(_spec, store))
    if spec is not None:
        evidence.steps_per_update = spec.steps_per_update
        evidence.samples_per_prompt = spec.training.samples_per_prompt
    return evidence


def _checkpoint(store: Store) -> Position | None:
    newest = newest_checkpoint(store)
    if newest is None:
        return None
    return Position(
        consumed=newest.update,
        epoch=read_marker(store, newest).epoch,
        state=read_cursor(store, newest),
        source=f"{newest.folder}/{layout.CURSOR}",
    )


def _read_rows(store: Store, evidence: Evidence) -> None:
    read = evidence.try_read(layout.UPDATES, partial(store.read_jsonl, layout.UPDATES))
    if read is None:
        return
    broken = read.torn_lines
    for row in read.rows:
        try:
            evidence.rows.append(UpdateRow.model_validate(row))
        except ValidationError:
            broken += 1
    if broken:
        evidence.notes.append(f"{layout.UPDATES}: {broken} torn lines passed over")


def _read_manifests(store: Store, evidence: Evidence) -> None:
    names = evidence.try_read(layout.ROLLOUTS, partial(store.list, layout.ROLLOUTS))
    for name in names or ():
        match = _MANIFEST.fullmatch(name)
        if match is None:
            continue
        path = f"{layout.ROLLOUTS}/{name}"
        manifest = evidence.try_read(path, partial(_manifest, store, path))
        if manifest is not None:
            evidence.manifests[int(match[1]), int(match[2])] = manifest


def _manifest(store: Store, path: str) -> CollectionManifest:
    return CollectionManifest.model_validate(store.read_json(path))


def _object(store: Store, path: str) -> dict[str, Any]:
    value = store.read_json(path)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _spec(store: Store) -> RunSpec:
    document = _object(store, layout.RESOLVED_CONFIG)
    return resolve_document(document, origin=layout.RESOLVED_CONFIG).spec


def _first_line(error: Exception) -> str:
    text = error.message if isinstance(error, PerdureError) else str(error)
    return text.splitlines()[0] if text else type(error).__name__
