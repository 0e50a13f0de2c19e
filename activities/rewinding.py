"""Going back to an earlier checkpoint: deciding, recording, setting aside.

The record is the rewind (see ``activities.storage.rewinds``). What follows moves files that do not
count any more to ``rewound/epoch-NNNNNNNN/``, under their former paths. Every step may be repeated,
and whoever claims the root next finishes what a kill cut off.
"""

import re
import time
from collections.abc import Iterator
from typing import Any

import orjson
import structlog

from activities.analysis.evidence import read_evidence
from activities.analysis.line import final_line
from activities.storage import layout
from activities.storage.commit import intact_checkpoints
from activities.storage.lease import require_epoch
from activities.storage.rewinds import is_settled, read_rewinds, record_rewind
from activities.storage.store import Store
from configs.load import resolve_document
from models.checkpoint import CheckpointRef, Rewind, RewindRequest
from models.errors import ConfigurationError, PerdureError
from models.run import RunState

_CHECKPOINT = re.compile(r"rollout_(\d{7,})\.e(\d+)u\d+a\d+")
_COLLECTION = re.compile(r"(\d{7,})\.e(\d+)\.(?:json|parquet)")
_EVALUATION = re.compile(r"eval_(\d{7,})\.e(\d+)\.parquet")
_RECEIPT = re.compile(r"update-(\d{8,})(?:-.*)?")
_PARTS = ".parts"
_DERIVED = (
    layout.REPORT,
    layout.THROUGHPUT_ANALYSIS,
    layout.CAPACITY_ANALYSIS,
    layout.OCCUPANCY_ANALYSIS,
)
_CLEARED = ("error", "finished_unix", "result")

_log = structlog.get_logger(__name__)


def plan_rewind(store: Store, request: RewindRequest, epoch: int, workflow_run_id: str) -> Rewind:
    """What ``request`` means for the root as it stands. Changes nothing.

    Raises:
        ConfigurationError: there is no such checkpoint, or nothing lies after it.
    """
    wanted = request.updates
    done = len(final_line(read_evidence(store)).updates)
    checkpoint = checkpoint_after(store, wanted)
    if wanted == done:
        raise ConfigurationError(
            f"{store.root}: the run stands after {done} updates already, with a checkpoint: there "
            "is nothing to undo; `perdure run` goes on from there"
        )
    return Rewind(
        epoch=epoch,
        updates=wanted,
        undone_updates=done - wanted,
        checkpoint=checkpoint,
        reason=request.reason,
        workflow_run_id=workflow_run_id,
        time_unix=time.time(),
    )


def checkpoint_after(store: Store, updates: int) -> CheckpointRef:
    """The newest intact checkpoint after ``updates`` updates.

    Raises:
        ConfigurationError: there is none, or so many updates were never finished.
    """
    saved = intact_checkpoints(store)
    if updates in saved:
        return saved[updates]
    done = len(final_line(read_evidence(store)).updates)
    there = ", ".join(map(str, sorted(saved))) or "none"
    if updates > done:
        raise ConfigurationError(
            f"{store.root}: no checkpoint after {updates} updates, only {done} are finished; there "
            f"are checkpoints after {there} updates"
        )
    raise ConfigurationError(
        f"{store.root}: no intact checkpoint after {updates} updates; there are checkpoints after "
        f"{there} updates{_retention(store)}"
    )


def _retention(store: Store) -> str:
    """What the run deletes by its own run file, for a refusal; empty when that is nothing."""
    try:
        document = store.read_json(layout.RESOLVED_CONFIG)
        core = resolve_document(document, origin=layout.RESOLVED_CONFIG).spec.core
    except (FileNotFoundError, PerdureError):
        return ""
    if core.checkpoint_keep_last is None:
        return ""
    kept = f"core.checkpoint_keep_last = {core.checkpoint_keep_last}"
    if core.checkpoint_keep_every is not None:
        kept += f" and core.checkpoint_keep_every = {core.checkpoint_keep_every}"
    return (
        f". The run deletes older ones ({kept}): set a larger core.checkpoint_keep_last, or "
        "core.checkpoint_keep_every, before the start of a run that may have to go back"
    )


def rewind_once(store: Store, request: RewindRequest, epoch: int, workflow_run_id: str) -> Rewind:
    """Record the rewind that this workflow run asked for, or find that it was recorded already.

    Raises:
        ConfigurationError: see ``plan_rewind``.
        StaleFence: ``epoch`` does not own the root any more.
    """
    for rewind in read_rewinds(store):
        if rewind.workflow_run_id == workflow_run_id:
            return rewind
    rewind = plan_rewind(store, request, epoch, workflow_run_id)
    record_rewind(store, rewind)
    _log.warning("run rewound", root=store.root, updates=rewind.updates, epoch=epoch)
    return rewind


def settle_rewinds(store: Store, export: str, epoch: int) -> None:
    """Set aside what recorded rewinds undid and is not set aside yet.

    Args:
        store: the root, owned by the caller.
        export: the folder of the run's export, relative to the root.
        epoch: the caller's. It is asked for before each step: whoever takes the next one settles as
            well and goes on, and files of the same names are then its own.

    Raises:
        StaleFence: ``epoch`` does not own the root any more; what is left is the new owner's.
    """
    for rewind in read_rewinds(store):
        if not is_settled(store, rewind):
            _settle(store, rewind, export, epoch)


def _settle(store: Store, rewind: Rewind, export: str, epoch: int) -> None:
    aside = layout.rewound_folder(rewind.epoch)
    for rel in (*_undone_files(store, rewind), export, *_DERIVED):
        if store.exists(rel):
            require_epoch(store, epoch)
            store.rename(rel, f"{aside}/{rel}")
    for rel in _row_files(store):
        _cut(store, rel, rewind, aside, epoch)
    pointer = {"rollout_id": rewind.updates - 1, "folder": rewind.checkpoint.folder}
    require_epoch(store, epoch)
    store.write_json(layout.LATEST, pointer)
    _write_state(store, rewind, epoch)
    store.write_json(f"{aside}/{layout.REWIND_SETTLED}", {"time_unix": time.time()})


def _undone_files(store: Store, rewind: Rewind) -> Iterator[str]:
    """Files and folders that hold nothing but undone work. Manifests come before their samples."""

    def names(folder: str, pattern: re.Pattern[str], first: int) -> Iterator[str]:
        for name in store.list(folder):
            match = pattern.fullmatch(name)
            if match is None or int(match[1]) < first:
                continue
            if match.re.groups < 2 or int(match[2]) < rewind.epoch:
                yield f"{folder}/{name}"

    undone, evaluated = rewind.updates, rewind.updates + 1
    yield from names(layout.CHECKPOINT_FOLDERS, _CHECKPOINT, undone)
    yield from names(layout.ROLLOUTS, _COLLECTION, undone)
    yield from names(layout.ROLLOUTS, _EVALUATION, evaluated)
    yield from names(layout.EVALUATION, _RECEIPT, evaluated)
    yield from names(layout.EVAL_SNAPSHOTS, _RECEIPT, evaluated)


def _row_files(store: Store) -> Iterator[str]:
    """Files of measurements. ``updates.jsonl`` stays whole: its epochs tell what counts."""
    folder = layout.METRICS.rpartition("/")[0]
    for name in store.list(folder):
        rel = f"{folder}/{name.removesuffix(_PARTS)}"
        if rel.endswith(".jsonl") and rel != layout.UPDATES:
            yield rel


def _cut(store: Store, rel: str, rewind: Rewind, aside: str, epoch: int) -> None:
    """Take the rows of undone updates out of ``rel``; the file as it was is kept whole."""
    if not store.is_local:
        require_epoch(store, epoch)
        store.set_rows_aside(rel, lambda row: _is_undone_row(row, rewind), f"{aside}/{rel}")
        return
    data = store.read_bytes(rel)
    lines = data.split(b"\n")
    kept = [line for line in lines if not _is_undone_row(line, rewind)]
    if len(kept) == len(lines):
        return
    if not store.exists(f"{aside}/{rel}"):
        store.write_bytes(f"{aside}/{rel}", data)
    cut = f"{aside}/{rel}.cut"
    store.write_bytes(cut, b"\n".join(kept))
    require_epoch(store, epoch)  # a new owner appends only after its claim
    store.rename(cut, rel)


def _is_undone_row(line: bytes, rewind: Rewind) -> bool:
    try:
        row: Any = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False  # empty, or torn by a kill
    if not isinstance(row, dict):
        return False
    if row.get("kind") == "eval":  # counted in finished updates
        return isinstance(row.get("update"), int) and row["update"] > rewind.updates
    update = row.get("update", row.get("rollout_id"))
    return isinstance(update, int) and update >= rewind.updates


def _write_state(store: Store, rewind: Rewind, epoch: int) -> None:
    """``workflow.json`` for readers: resumable, as a stop after that many updates leaves it."""
    state = store.read_json(layout.WORKFLOW_JSON) if store.exists(layout.WORKFLOW_JSON) else {}
    kept = {key: value for key, value in state.items() if key not in _CLEARED}
    rewound = {"updates": rewind.updates, "epoch": rewind.epoch, "reason": rewind.reason}
    changed = {"status": RunState.STOPPED.value, "update": rewind.updates, "rewound": rewound}
    require_epoch(store, epoch)
    store.write_json(layout.WORKFLOW_JSON, kept | changed)
