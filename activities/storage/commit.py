"""Checkpoint protocol: a checkpoint exists from the moment its completion marker does.

Order of a commit: the trainer writes its files into a folder that no other attempt uses; cursor and
ledger; every file is read back and made durable; ``complete.json`` with every digest; the pointer
``core-latest.json``. A kill in front of the marker leaves the previous checkpoint the newest one; a
kill behind it leaves the new one, pointer or not.

Whoever claims the root takes the marker's place in folders that older epochs left without one: so
none of them can commit behind the claim.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import structlog

from activities.storage import layout
from activities.storage.lease import require_epoch
from activities.storage.rewinds import is_undone, read_rewinds
from activities.storage.store import Store
from models.checkpoint import CheckpointFile, CheckpointMarker, CheckpointRef, PolicyClock
from models.errors import ContractViolation, DigestMismatch, PerdureError, StaleFence
from models.ids import FenceToken, RunRef
from models.prompt import DataState

_FOLDER = re.compile(r"rollout_(\d{7,})\.e(\d+)u(\d+)a(\d+)")
_SCHEMA_VERSION = 2
_READERS = 4
"""Files of a checkpoint that are read at once to be compared with their digests."""
FENCED_OFF = "fenced_off"
"""The only key of what may stand in a marker's place: its folder never becomes a checkpoint."""
_FENCED = f'{{"{FENCED_OFF}": true}}\n'.encode()

_log = structlog.get_logger(__name__)


class _Place(NamedTuple):
    """A checkpoint folder by its name; sorts as (update, epoch, fence update, attempt)."""

    update: int
    epoch: int
    fence_update: int
    attempt: int
    folder: str


class SavedFolder(NamedTuple):
    """A checkpoint's folder as it stands; without a marker it is no checkpoint."""

    update: int
    epoch: int
    folder: str
    marker: CheckpointMarker | None
    fault: str
    """Why there is no marker; empty when there is one."""


def commit_checkpoint(
    store: Store,
    run: RunRef,
    token: FenceToken,
    clock: PolicyClock,
    cursor: DataState,
    files: Sequence[CheckpointFile],
    folder: str,
    metrics: Mapping[str, float] | None = None,
) -> CheckpointRef:
    """Commit the ``files`` that the trainer wrote into ``folder`` together with ``cursor``.

    Repeating a commit whose answer was lost returns the same reference. Raises ``StaleFence`` when
    the token's epoch no longer owns the root, ``DigestMismatch`` naming a file that is not on
    storage as reported, ``ContractViolation`` for a folder of another token or clock.
    """
    started = time.monotonic()
    expected = layout.checkpoint_folder(clock.next_rollout_id - 1, token)
    if folder != expected:
        raise ContractViolation(f"checkpoint folder {folder!r} must be {expected!r} for {token}")
    require_epoch(store, token.epoch)
    data = cursor.model_dump_json(indent=2).encode() + b"\n"
    cursor_file = CheckpointFile(path=layout.CURSOR, sha256=_sha256(data), num_bytes=len(data))
    every_file = (*files, cursor_file)
    marker_path = f"{folder}/{layout.COMPLETE}"
    if store.exists(marker_path):
        encoded = _same_commit(store, marker_path, clock, every_file)
    else:
        store.write_bytes(f"{folder}/{layout.CURSOR}", data)
        _with_each(every_file, partial(_secure_file, store, folder))
        marker = CheckpointMarker(
            run_id=run.run_id,
            spec_sha256=run.spec_sha256,
            epoch=token.epoch,
            clock=clock,
            cursor_sha256=cursor_file.sha256,
            files=every_file,
            created_unix=time.time(),
            metrics=dict(metrics or {}),
        )
        encoded = marker.model_dump_json(indent=2).encode() + b"\n"
        require_epoch(store, token.epoch)
        if not store.create_exclusive(marker_path, encoded):
            # A call whose answer was lost has committed it meanwhile.
            encoded = _same_commit(store, marker_path, clock, every_file)
    pointer = {"rollout_id": clock.next_rollout_id - 1, "folder": folder}
    store.write_json(layout.LATEST, pointer)
    return _reference(folder, clock, encoded, time.monotonic() - started)


def fence_off_commits(store: Store, epoch: int) -> None:
    """Leave no commit of an epoch before ``epoch`` that could still come to an end.

    Such a commit may have found its epoch in order just before ``epoch`` was taken. Its folder is
    there then, and it creates its marker exclusively, as this does: one of both comes first.
    """
    for place in _places(store):
        _, encoded = _load_marker(store, place.folder)
        if not encoded and place.epoch < epoch:
            store.create_exclusive(f"{place.folder}/{layout.COMPLETE}", _FENCED)


def newest_checkpoint(store: Store) -> CheckpointRef | None:
    """The newest committed checkpoint by (next_rollout_id, epoch, update, attempt), or None.

    Folders are scanned; the pointer is for people only and may be stale or missing. Folders without
    a readable marker do not count. One whose marker names files that are missing or have another
    size is passed over with a warning, but when nothing else is left it raises ``DigestMismatch``:
    a damaged run must not silently start over.
    """
    damage: list[str] = []
    for place in _places(store):
        marker, encoded = _load_marker(store, place.folder)
        if marker is None:
            continue
        fault = _damage(store, place.folder, marker)
        if fault is None:
            return _reference(place.folder, marker.clock, encoded)
        _log.warning("damaged checkpoint passed over", reason=fault)
        damage.append(fault)
    if damage:
        raise DigestMismatch(
            f"no intact checkpoint is left: {'; '.join(damage)}. Restore the named files, or start "
            "afresh with another output.root"
        )
    return None


def intact_checkpoints(store: Store) -> dict[int, CheckpointRef]:
    """Finished updates -> the newest committed checkpoint that holds them, whole by its sizes."""
    found: dict[int, CheckpointRef] = {}
    for place in _places(store):
        marker, encoded = _load_marker(store, place.folder)
        if marker is not None and _damage(store, place.folder, marker) is None:
            found.setdefault(place.update + 1, _reference(place.folder, marker.clock, encoded))
    return found


def saved_folders(store: Store) -> list[SavedFolder]:
    """Every checkpoint folder, oldest first, with or without a readable marker.

    Raises ``ContractViolation`` for a marker of a newer version.
    """
    found = []
    for place in reversed(_places(store)):
        marker, encoded = _load_marker(store, place.folder)
        fault = "" if marker else _fault(encoded)
        found.append(SavedFolder(place.update, place.epoch, place.folder, marker, fault))
    return found


def read_marker(store: Store, ref: CheckpointRef) -> CheckpointMarker:
    """The completion marker of ``ref``; ``DigestMismatch`` when it is not the recorded one."""
    path = f"{ref.folder}/{layout.COMPLETE}"
    encoded = _existing(store, path)
    _require_digest(store, path, ref.marker_sha256, _sha256(encoded))
    return CheckpointMarker.model_validate_json(encoded)


def read_cursor(store: Store, ref: CheckpointRef) -> DataState:
    """Cursor and ledger of ``ref``; ``DigestMismatch`` when missing or altered."""
    marker = read_marker(store, ref)
    path = f"{ref.folder}/{layout.CURSOR}"
    data = _existing(store, path)
    _require_digest(store, path, marker.cursor_sha256, _sha256(data))
    return DataState.model_validate_json(data)


def verify_checkpoint(store: Store, ref: CheckpointRef) -> CheckpointMarker:
    """Re-read every byte of ``ref``; ``DigestMismatch`` names the first file that differs."""
    marker = read_marker(store, ref)
    _with_each(marker.files, partial(_verify_file, store, ref.folder))
    return marker


def retain(
    store: Store, keep_last: int | None, keep_every: int | None, latest: CheckpointRef
) -> tuple[str, ...]:
    """Delete what need not be kept; return the folders deleted.

    Kept: the ``keep_last`` newest intact updates (None keeps all), every update u with
    (u + 1) % keep_every == 0, and always ``latest`` and the newest intact one. An older attempt's
    copy of an update and folders without a marker of epochs before ``latest``'s go too; damaged
    ones stay for inspection. A failed deletion is a warning only.

    Raises ``StaleFence`` when ``latest``'s epoch no longer owns the root: a newer one may be
    resuming from a folder that this one would delete.
    """
    places = _places(store)
    intact, unmarked = _sorted_out(store, places)
    newest_of_update = {place.update: place for place in reversed(intact)}
    updates = sorted(newest_of_update, reverse=True)
    kept_updates = set(updates if keep_last is None else updates[: max(keep_last, 1)])
    if keep_every is not None:
        kept_updates.update(update for update in updates if (update + 1) % keep_every == 0)
    kept = {newest_of_update[update].folder for update in kept_updates} | {latest.folder}
    epoch = max((place.epoch for place in places if place.folder == latest.folder), default=0)
    require_epoch(store, epoch)
    doomed = [place.folder for place in intact if place.folder not in kept]
    doomed += [place.folder for place in unmarked if place.epoch < epoch]
    return tuple(folder for folder in doomed if _deleted(store, folder))


def _sorted_out(store: Store, places: Sequence[_Place]) -> tuple[list[_Place], list[_Place]]:
    """Intact places and those without a readable marker, newest first each."""
    intact: list[_Place] = []
    unmarked: list[_Place] = []
    for place in places:
        marker, _ = _load_marker(store, place.folder)
        if marker is None:
            unmarked.append(place)
        elif _damage(store, place.folder, marker) is None:
            intact.append(place)
    return intact, unmarked


def _deleted(store: Store, folder: str) -> bool:
    try:
        # The marker goes first: a deletion cut short leaves a folder that does not count.
        store.remove_tree(f"{folder}/{layout.COMPLETE}")
        store.remove_tree(folder)
    except (OSError, PerdureError) as error:
        _log.warning("checkpoint not deleted", folder=folder, reason=str(error))
        return False
    return True


def _places(store: Store) -> list[_Place]:
    """Every checkpoint folder that no rewind undid, newest first, marker or not."""
    rewinds = read_rewinds(store)
    places = _named_places(store)
    return sorted(
        (each for each in places if not is_undone(rewinds, each.update, each.epoch)), reverse=True
    )


def _named_places(store: Store) -> Iterator[_Place]:
    for name in store.list(layout.CHECKPOINT_FOLDERS):
        if match := _FOLDER.fullmatch(name):
            update, epoch, fence_update, attempt = map(int, match.groups())
            folder = f"{layout.CHECKPOINT_FOLDERS}/{name}"
            yield _Place(update, epoch, fence_update, attempt, folder)


def _load_marker(store: Store, folder: str) -> tuple[CheckpointMarker | None, bytes]:
    """Marker and its bytes; no marker when it is missing, fenced off or does not parse."""
    path = f"{folder}/{layout.COMPLETE}"
    try:
        encoded = store.read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        return None, b""
    if encoded == _FENCED:
        return None, encoded
    try:
        marker = CheckpointMarker.model_validate_json(encoded)
    except ValueError as error:
        _log.warning("unreadable marker ignored", file=f"{store.root}/{path}", reason=str(error))
        return None, encoded
    if marker.schema_version > _SCHEMA_VERSION:
        raise ContractViolation(
            f"{store.root}/{path} has schema {marker.schema_version}, this version of Perdure "
            f"reads up to {_SCHEMA_VERSION}; resume with the newer version that wrote it"
        )
    return marker, encoded


def _damage(store: Store, folder: str, marker: CheckpointMarker) -> str | None:
    """What is wrong with the sizes of the files under ``marker``; None when nothing is."""
    for file in marker.files:
        where = f"{store.root}/{folder}/{file.path}"
        try:
            size = store.size(f"{folder}/{file.path}")
        except FileNotFoundError:
            return f"{where} is missing"
        if size != file.num_bytes:
            return f"{where} has {size} bytes instead of {file.num_bytes}"
    return None


def _with_each(files: Sequence[CheckpointFile], check: Callable[[CheckpointFile], None]) -> None:
    """``check`` every file, several at once; raises for the first that fails, in their order."""
    with ThreadPoolExecutor(_READERS) as readers:
        for _ in readers.map(check, files):
            pass


def _secure_file(store: Store, folder: str, file: CheckpointFile) -> None:
    """Find a file as it is recorded and flush it to the device."""
    _verify_file(store, folder, file)
    store.make_durable(f"{folder}/{file.path}")


def _verify_file(store: Store, folder: str, file: CheckpointFile) -> None:
    path = f"{folder}/{file.path}"
    try:
        size = store.size(path)
    except FileNotFoundError as error:
        raise DigestMismatch(f"{store.root}/{path} is missing") from error
    if size != file.num_bytes:
        raise DigestMismatch(
            f"{store.root}/{path} has {size} bytes instead of the recorded {file.num_bytes}"
        )
    _require_digest(store, path, file.sha256, store.sha256(path))


def _require_digest(store: Store, path: str, recorded: str, found: str) -> None:
    if recorded != found:
        raise DigestMismatch(
            f"{store.root}/{path}: recorded SHA-256 {recorded}, found {found}; restore it, or "
            "remove its checkpoint's folder to go on from the checkpoint before"
        )


def _existing(store: Store, path: str) -> bytes:
    try:
        return store.read_bytes(path)
    except FileNotFoundError as error:
        raise DigestMismatch(f"{store.root}/{path} is missing") from error


def _fault(encoded: bytes) -> str:
    """Why ``encoded`` is no marker."""
    if encoded == _FENCED:
        return "fenced off"
    return "unreadable" if encoded else "missing"


def _same_commit(
    store: Store, path: str, clock: PolicyClock, files: tuple[CheckpointFile, ...]
) -> bytes:
    """Bytes of a marker that already stands, if it is of the very same commit."""
    encoded = store.read_bytes(path)
    if encoded == _FENCED:
        raise StaleFence(
            f"{store.root}/{path}: a newer epoch owns the root, this commit is refused"
        )
    marker = CheckpointMarker.model_validate_json(encoded)
    if marker.clock != clock or marker.files != files:
        raise ContractViolation(f"{store.root}/{path} is committed already, with other content")
    return encoded


def _reference(
    folder: str, clock: PolicyClock, encoded: bytes, seconds: float = 0.0
) -> CheckpointRef:
    return CheckpointRef(
        update=clock.next_rollout_id - 1,
        policy_version=clock.completed_steps,
        folder=folder,
        marker_sha256=_sha256(encoded),
        seconds=seconds,
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
