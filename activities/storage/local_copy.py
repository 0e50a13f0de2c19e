"""Folders of an output root as local files: models are mapped into memory, not read as objects.

On a local root a folder is where it is. On an object store ``put_folder`` writes its files, then
``.files.json`` with their digests, which makes the folder count. ``local_folder`` downloads it once
for a host, proves every digest, and keeps it in a cache by the digest of that list:

    <cache>/folders/<digest>         the files
    <cache>/folders/<digest>.proved  their sizes and times when their digests were proved
    <cache>/folders/<digest>.lock    held shared by every process that may read them
    <cache>/transfer/<unique>        what is on its way to or from the store

Locks are the kernel's, so a killed process leaves none. ``PERDURE_CACHE_DIR`` names the cache,
``PERDURE_CACHE_GIB`` its limit: folders that nobody holds go first that were used longest ago.
"""

import hashlib
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson
import structlog
from pydantic import ValidationError

from activities.storage.atomic import storage_errors, sync_file, write_file
from activities.storage.host_lock import HostLock, Mode
from activities.storage.store import Store
from models.base import Carried
from models.checkpoint import CheckpointFile
from models.errors import (
    ConfigurationError,
    ContractViolation,
    DigestMismatch,
    ServiceUnreachable,
    StorageFull,
)

FILES = ".files.json"
"""Written last: the files of a folder on an object store, with their digests."""
CACHE_DIR = "PERDURE_CACHE_DIR"
CACHE_GIB = "PERDURE_CACHE_GIB"
DEFAULT_GIB = 500.0
DOWNLOAD_S = 7200.0
"""Longest wait for another process of this host that downloads the same folder."""

_OWN_LOCK_S = 10.0
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
    entry = _cache() / "folders" / hashlib.sha256(encoded).hexdigest()[:32]
    with _HOLDING:
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


@contextmanager
def transfer_folder() -> Iterator[Path]:
    """A private folder in the cache; gone afterwards. What killed processes left goes first."""
    base = _cache() / "transfer"
    with storage_errors(str(base)):
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(base)
        folder = base / uuid.uuid4().hex
        with HostLock(base / f"{folder.name}.lock").held(Mode.ALONE, _OWN_LOCK_S):
            folder.mkdir()
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                (base / f"{folder.name}.lock").unlink(missing_ok=True)


def _obtained(store: Store, rel: str, files: tuple[CheckpointFile, ...], entry: Path) -> HostLock:
    """The shared lock on ``entry``, which is there and proved."""
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = HostLock(entry.parent / f"{entry.name}.lock")
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
    with storage_errors(str(entry)), transfer_folder() as folder:
        _make_room(entry.parent, num_bytes)
        download(store, rel, files, folder)
        stats = {}
        for file in files:
            sync_file(folder / file.path)
            stats[file.path] = _stat(folder / file.path)
        folder.rename(entry)
        write_file(_proof_of(entry), orjson.dumps(stats))
    seconds = round(time.monotonic() - started, 1)
    _log.info("folder downloaded", source=f"{store.root}/{rel}", bytes=num_bytes, seconds=seconds)


def _make_room(folders: Path, num_bytes: int) -> None:
    """Remove folders that nobody holds until ``num_bytes`` fit below the limit and on the disk."""
    limit = _limit_bytes()
    locks = sorted(folders.glob("*.lock"), key=lambda path: path.stat().st_mtime)
    entries = [path.with_suffix("") for path in locks if path.with_suffix("").is_dir()]
    sizes = {entry: _num_bytes(entry) for entry in entries}
    for entry in entries:
        if not _lacks_room(folders, sizes, num_bytes, limit):
            return
        with suppress(ServiceUnreachable), HostLock(_lock_of(entry)).held(Mode.ALONE, 0.0):
            shutil.rmtree(entry, ignore_errors=True)
            sizes[entry] = 0
            _log.info("folder left the cache", folder=str(entry))
    if _lacks_room(folders, sizes, num_bytes, limit):
        raise StorageFull(
            f"{folders}: {num_bytes >> 20} MiB do not fit: {sum(sizes.values()) >> 20} MiB are in "
            f"use of {limit >> 20} MiB ({CACHE_GIB}), {shutil.disk_usage(folders).free >> 20} MiB "
            f"are free; raise the limit, free space, or name another folder in {CACHE_DIR}"
        )


def _lacks_room(folders: Path, sizes: dict[Path, int], num_bytes: int, limit: int) -> bool:
    free = shutil.disk_usage(folders).free
    return sum(sizes.values()) + num_bytes > limit or num_bytes > free


def _remove_abandoned(base: Path) -> None:
    for lock in base.glob("*.lock"):
        with suppress(ServiceUnreachable), HostLock(lock).held(Mode.ALONE, 0.0):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)


def _is_proved(entry: Path) -> bool:
    """Whether the files are those that were proved, by size and time of change."""
    try:
        proved: dict[str, list[int]] = orjson.loads(_proof_of(entry).read_bytes())
        return all(_stat(entry / name) == stat for name, stat in proved.items())
    except (OSError, orjson.JSONDecodeError):
        return False


def _cache() -> Path:
    default = Path(tempfile.gettempdir()) / f"perdure-cache-{os.getuid()}"
    cache = Path(os.environ.get(CACHE_DIR) or default)
    with storage_errors(str(cache)):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if cache.stat().st_uid != os.getuid():
        raise ConfigurationError(
            f"{cache} belongs to another user; name a folder of your own in {CACHE_DIR}"
        )
    return cache


def _limit_bytes() -> int:
    text = os.environ.get(CACHE_GIB) or str(DEFAULT_GIB)
    try:
        gibibytes = float(text)
    except ValueError:
        gibibytes = 0.0
    if not 0 < gibibytes < float("inf"):
        raise ConfigurationError(f"{CACHE_GIB} is {text!r}; set it to a number of GiB, as in 200")
    return int(gibibytes * (1 << 30))


def _lock_of(entry: Path) -> Path:
    return entry.parent / f"{entry.name}.lock"


def _proof_of(entry: Path) -> Path:
    return entry.parent / f"{entry.name}.proved"


def _stat(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
