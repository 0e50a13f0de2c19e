"""Folders of an output root as local files: models are mapped into memory, not read as objects.

On a local root a folder is where it is. On an object store ``put_folder`` writes its files, then
``.files.json`` with their digests, which makes the folder count. ``local_folder`` downloads it once
for a host, proves every digest, and keeps it in a cache by the digest of that list:

    <cache>/folders/<digest>         the files
    <cache>/folders/<digest>.proved  their sizes and times when their digests were proved
    <cache>/folders/<digest>.lock    held shared by every process that may read them

The rest of the cache is ``host_cache``'s.
"""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import orjson
import structlog
from pydantic import ValidationError

from activities.storage.atomic import sync_file, write_file
from activities.storage.host_cache import (
    keep,
    kept_folders,
    lock_of,
    proof_of,
    room_errors,
    transfer_folder,
)
from activities.storage.host_lock import HostLock, Mode
from activities.storage.store import Store
from models.base import Carried
from models.checkpoint import CheckpointFile
from models.errors import ContractViolation, DigestMismatch

FILES = ".files.json"
"""Written last: the files of a folder on an object store, with their digests."""
DOWNLOAD_S = 7200.0
"""Longest wait for another process of this host that downloads the same folder."""

_HELD: dict[Path, HostLock] = {}
"""Of this process, until it ends: it may read these folders at any time."""
_HOLDING = threading.Lock()

_log = structlog.get_logger(__name__)


class FolderFiles(Carried):
    """Content of ``.files.json``."""

    files: tuple[CheckpointFile, ...]


def put_folder(store: Store, local: Path, rel: str) -> None:
    """Copy every file of ``local`` to the folder ``rel`` of an object store, the list last."""
    files = []
    for path in sorted(path for path in local.rglob("*") if path.is_file()):
        name = path.relative_to(local).as_posix()
        store.put_file(path, f"{rel}/{name}")
        files.append(CheckpointFile(path=name, sha256=_sha256(path), num_bytes=path.stat().st_size))
    encoded = FolderFiles(files=tuple(files)).model_dump_json(indent=2).encode() + b"\n"
    store.write_bytes(f"{rel}/{FILES}", encoded)


def has_folder(store: Store, rel: str) -> bool:
    """Whether ``rel`` is a folder, on an object store a complete one."""
    return store.exists(rel if store.is_local else f"{rel}/{FILES}")


def local_folder(store: Store, rel: str) -> Path:
    """The folder ``rel`` on this host, whole, for as long as this process lives. Blocks.

    Raises:
        FileNotFoundError: the store has no such complete folder.
        DigestMismatch: the store holds other files than were put there.
        StorageFull: the cache cannot take it.
        ServiceUnreachable: another process has not finished downloading it in time.
        ConfigurationError: the cache belongs to another user, or its limit is no number.
    """
    if store.is_local:
        return store.local_path(rel)
    encoded = store.read_bytes(f"{rel}/{FILES}")
    try:
        listed = FolderFiles.model_validate_json(encoded)
    except ValidationError as error:
        raise ContractViolation(f"{store.root}/{rel}/{FILES} is no list of files") from error
    with _HOLDING, room_errors(sum(file.num_bytes for file in listed.files)):
        entry = kept_folders() / hashlib.sha256(encoded).hexdigest()[:32]
        if entry in _HELD and _is_proved(entry):
            return entry
        if entry in _HELD:
            _HELD.pop(entry).give_up()
        _HELD[entry] = _obtained(store, rel, listed.files, entry)
        return entry


def download(store: Store, rel: str, files: Iterable[CheckpointFile], folder: Path) -> None:
    """Write ``files`` of the store's folder ``rel`` into ``folder``, each proved.

    Raises:
        DigestMismatch: a file is missing or differs.
    """
    for file in files:
        target = folder / file.path
        if not target.resolve().is_relative_to(folder.resolve()):
            raise ContractViolation(f"{store.root}/{rel}: {file.path!r} leads out of the folder")
        where = f"{store.root}/{rel}/{file.path}"
        try:
            store.get_file(f"{rel}/{file.path}", target)
        except FileNotFoundError as error:
            raise DigestMismatch(f"{where} is missing") from error
        found = _sha256(target)
        if found != file.sha256:
            raise DigestMismatch(f"{where}: recorded SHA-256 {file.sha256}, found {found}")


def _obtained(store: Store, rel: str, files: tuple[CheckpointFile, ...], entry: Path) -> HostLock:
    """The shared lock on ``entry``, which is there and proved."""
    lock = HostLock(lock_of(entry))
    deadline = time.monotonic() + DOWNLOAD_S
    while True:
        lock.take(Mode.SHARED, deadline - time.monotonic())
        if _is_proved(entry):
            os.utime(lock.path)
            return lock
        lock.give_up()
        with lock.held(Mode.ALONE, deadline - time.monotonic()):
            if not _is_proved(entry):
                _fill(store, rel, files, entry)


def _fill(store: Store, rel: str, files: tuple[CheckpointFile, ...], entry: Path) -> None:
    """Download into a sibling and rename; the caller holds the entry alone."""
    started = time.monotonic()
    num_bytes = sum(file.num_bytes for file in files)
    shutil.rmtree(entry, ignore_errors=True)
    with transfer_folder(num_bytes) as folder:
        download(store, rel, files, folder)
        stats = {}
        for file in files:
            sync_file(folder / file.path)
            stats[file.path] = _stat(folder / file.path)
        keep(folder, entry)
        write_file(proof_of(entry), orjson.dumps(stats))
    seconds = round(time.monotonic() - started, 1)
    _log.info("folder downloaded", source=f"{store.root}/{rel}", bytes=num_bytes, seconds=seconds)


def _is_proved(entry: Path) -> bool:
    """Whether the files are those that were proved, by size and time of change."""
    try:
        proved: dict[str, list[int]] = orjson.loads(proof_of(entry).read_bytes())
        return all(_stat(entry / name) == stat for name, stat in proved.items())
    except (OSError, orjson.JSONDecodeError):
        return False


def _stat(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
