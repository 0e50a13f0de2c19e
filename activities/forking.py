"""Forking: a new run from a checkpoint of another, which stays as it is.

The new root looks like one whose run was stopped after that checkpoint: prompts, collections and
rows that led to it, the checkpoint under the new run's name, and ``fork.json``, which says where it
came from. It is made beside its place and renamed into it: it is there whole or not at all.
Immutable files are hard links where the file system allows, so a fork costs no space.
"""

import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from activities.analysis.evidence import read_evidence
from activities.analysis.line import FinalLine, final_line
from activities.rewinding import checkpoint_after
from activities.storage import layout
from activities.storage.atomic import make_folder, sync_folder
from activities.storage.commit import read_marker, verify_checkpoint
from activities.storage.lease import current_epoch
from activities.storage.store import Store
from configs.load import Loaded
from configs.plan import build_plan
from models.checkpoint import CheckpointRef, Fork
from models.errors import ConfigurationError
from models.run import RunState


def require_place(target: str) -> Path:
    """Where the new root goes: a local path that does not exist, or an empty folder.

    Raises:
        ConfigurationError: something is there, or it is no local folder.
    """
    store = Store(target)
    if not store.is_local:
        raise ConfigurationError(f"{target}: a run is forked to a local folder")
    path = Path(store.root)
    try:
        is_free = not path.exists() or not any(path.iterdir())
    except NotADirectoryError:
        is_free = False
    if not is_free:
        raise ConfigurationError(f"{target} is not empty; choose another root for the new run")
    return path


def plan_fork(source: Store, updates: int) -> CheckpointRef:
    """The checkpoint to start from, every byte of it read. Changes nothing.

    Raises:
        ConfigurationError: there is no such checkpoint, or the root is in a bucket.
        DigestMismatch: it is damaged.
    """
    if not source.is_local:
        raise ConfigurationError(
            f"{source.root}: a run in a bucket cannot be forked; rewind it, or start a run that "
            "has its export as model.source"
        )
    reference = checkpoint_after(source, updates)
    verify_checkpoint(source, reference)
    return reference


def fork(source: Store, loaded: Loaded, reference: CheckpointRef) -> Fork:
    """Make the root of ``loaded``, a run that begins after ``reference`` of ``source``.

    Raises:
        ConfigurationError: the new root is not empty.
        FileNotFoundError: the source was changed meanwhile, by retention for example.
    """
    target = require_place(loaded.spec.output.root)
    make_folder(target.parent)
    staging = target.parent / f".{target.name}.forking-{uuid.uuid4().hex[:8]}"
    try:
        made = _fill(source, Store(staging), loaded, reference)
        os.replace(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync_folder(target.parent)
    return made


def _fill(source: Store, new: Store, loaded: Loaded, reference: CheckpointRef) -> Fork:
    updates = reference.update + 1
    evidence = read_evidence(source)
    line = final_line(evidence)
    for rel in _immutable(source, line, updates):
        _link(source, new, rel)
    _take_checkpoint(source, new, loaded, reference)
    _take_rows(source, new, line, updates)
    epoch = current_epoch(source)
    _link(source, new, layout.epoch_file(epoch))
    new.write_json(layout.RESOLVED_CONFIG, loaded.document)
    new.write_json(layout.PLAN_JSON, build_plan(loaded))
    made = Fork(
        run_id=loaded.spec.run_id,
        spec_sha256=loaded.sha256,
        identity_sha256=loaded.identity,
        updates=updates,
        policy_version=reference.policy_version,
        epoch=epoch,
        source_run_id=evidence.run_id,
        source_root=source.root,
        source_spec_sha256=read_marker(source, reference).spec_sha256,
        source_checkpoint=reference,
        host=socket.gethostname(),
        time_unix=time.time(),
    )
    new.write_json(layout.FORK_JSON, made.model_dump(mode="json"))
    new.write_json(layout.WORKFLOW_JSON, _state(made))
    return made


def _immutable(source: Store, line: FinalLine, updates: int) -> Iterator[str]:
    """What led to the checkpoint: prepared model and data, and the collections that count."""
    prepared = layout.PREPARED_REPORT.rpartition("/")[0]
    folder = source.local_path(prepared)
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    # The report is made anew: whoever prepares compares model and data with the new run file.
    yield from (f"{prepared}/{n}" for n in names if f"{prepared}/{n}" != layout.PREPARED_REPORT)
    for each in line.updates[:updates]:
        if each.manifest is not None:
            place = each.update, each.manifest.collection.epoch
            yield layout.collection_parquet(*place)
            yield layout.collection_manifest(*place)


def _take_checkpoint(source: Store, new: Store, loaded: Loaded, reference: CheckpointRef) -> None:
    marker = read_marker(source, reference)
    for file in marker.files:
        _link(source, new, f"{reference.folder}/{file.path}")
    changed = {"run_id": loaded.spec.run_id, "spec_sha256": loaded.sha256}
    own = marker.model_copy(update=changed)
    data = own.model_dump_json(indent=2).encode() + b"\n"
    new.write_bytes(f"{reference.folder}/{layout.COMPLETE}", data)
    new.write_json(layout.LATEST, {"rollout_id": reference.update, "folder": reference.folder})


def _take_rows(source: Store, new: Store, line: FinalLine, updates: int) -> None:
    """The rows that count, each once: updates, and the curves up to here."""
    for each in line.updates[:updates]:
        if each.recorded:
            row = {
                "update": each.update,
                "epoch": each.epoch,
                "batch_sha256": each.sha256,
                "policy_version": each.policy_version,
            }
            new.append_jsonl(layout.UPDATES, row)
    newest: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in source.read_jsonl(layout.METRICS).rows:
        newest[row.get("kind"), row.get("update")] = row
    for (kind, update), row in newest.items():
        if isinstance(update, int) and update < updates + (kind == "eval"):
            new.append_jsonl(layout.METRICS, row)


def _state(made: Fork) -> dict[str, Any]:
    """``workflow.json`` of a run that nobody has started yet."""
    return {
        "about": "forked; Temporal's workflow is the truth about this run once it is started",
        "run_id": made.run_id,
        "workflow_run_id": "",
        "spec_sha256": made.spec_sha256,
        "status": RunState.STOPPED.value,
        "attempt": 0,
        "epoch": made.epoch,
        "update": made.updates,
        "forked_from": {"run_id": made.source_run_id, "root": made.source_root},
    }


def _link(source: Store, new: Store, rel: str) -> None:
    """The same file without its bytes twice; a copy where that cannot be."""
    origin, place = source.local_path(rel), new.local_path(rel)
    make_folder(place.parent)
    if origin.is_symlink():
        place.symlink_to(origin.resolve())
        return
    try:
        os.link(origin, place)
    except FileNotFoundError:
        raise
    except OSError:
        new.put_file(origin, rel)
