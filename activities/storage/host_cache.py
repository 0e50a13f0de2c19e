"""The cache of a host: where it is, what is on its way through it, and room for one more folder.

    <cache>/folders/<name>          what is kept, each beside its lock ``<name>.lock``
    <cache>/transfer/<unique>       what is on its way to or from a store
    <cache>/transfer/<unique>.lock  held by whoever transfers it; says how many bytes it will have
    <cache>/room.lock               held while room is made: the limit is for all processes together

Locks are the kernel's, so a killed process leaves none. ``PERDURE_CACHE_DIR`` names the cache,
``PERDURE_CACHE_GIB`` its limit: folders that nobody holds go first that were used longest ago.
"""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import structlog

from activities.storage.atomic import storage_errors
from activities.storage.host_lock import HostLock, Mode
from activities.storage.store import free_bytes
from models.errors import ConfigurationError, ServiceUnreachable, StorageFull

CACHE_DIR = "PERDURE_CACHE_DIR"
CACHE_GIB = "PERDURE_CACHE_GIB"
DEFAULT_GIB = 500.0
ROOM_S = 600.0
"""Longest wait for other processes that make room."""
_OWN_LOCK_S = 10.0

_log = structlog.get_logger(__name__)


def kept_folders() -> Path:
    """Where folders are kept; made if missing.

    Raises:
        StorageFull: not even an empty folder can be made.
        ConfigurationError: the cache belongs to another user or cannot be written.
    """
    return _made("folders")


@contextmanager
def transfer_folder(num_bytes: int = 0) -> Iterator[Path]:
    """A private folder in the cache; gone afterwards. What killed processes left goes first.

    ``num_bytes`` that it will hold at most have room in the cache, beside all other transfers.

    Raises:
        StorageFull: there is no room.
        ServiceUnreachable: other processes have been making room for ``ROOM_S`` seconds.
        ConfigurationError: the cache belongs to another user, or its limit is no number.
    """
    base = _made("transfer")
    with storage_errors(str(base)):
        _remove_abandoned(base)
        folder = base / uuid.uuid4().hex
        lock = base / f"{folder.name}.lock"
        with HostLock(lock).held(Mode.ALONE, _OWN_LOCK_S):
            try:
                folder.mkdir()
                if num_bytes:
                    _reserve(lock, num_bytes)
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                lock.unlink(missing_ok=True)


def keep(folder: Path, entry: Path) -> None:
    """Make the transferred ``folder`` the kept ``entry``; whoever makes room counts it once."""
    with _making_room():
        folder.rename(entry)


@contextmanager
def room_errors(num_bytes: int) -> Iterator[None]:
    """Say of a disk that is full, before or while ``num_bytes`` are kept, what would help."""
    place = _place()
    try:
        with storage_errors(str(place)):
            yield
    except StorageFull as error:
        expected, _ = _on_their_way(place / "transfer")
        used = sum(_sizes(place / "folders").values()) + expected
        raise _no_room(num_bytes, used) from error


def proof_of(entry: Path) -> Path:
    """The file that vouches for a kept folder."""
    return entry.parent / f"{entry.name}.proved"


def lock_of(entry: Path) -> Path:
    """The file of a kept folder's lock."""
    return entry.parent / f"{entry.name}.lock"


def _reserve(lock: Path, num_bytes: int) -> None:
    """Make room and take it; what others have taken and not yet written counts as well."""
    folders = kept_folders()
    with _making_room():
        expected, missing = _on_their_way(lock.parent)
        _evict(folders, num_bytes, expected, missing)
        lock.write_text(str(num_bytes))


def _making_room() -> AbstractContextManager[None]:
    return HostLock(_cache() / "room.lock").held(Mode.ALONE, ROOM_S)


def _on_their_way(base: Path) -> tuple[int, int]:
    """Bytes that transfers will have, and those of them that are not on the disk yet."""
    expected = missing = 0
    for lock in base.glob("*.lock"):
        folder = lock.with_suffix("")
        with suppress(FileNotFoundError):
            declared = int(lock.read_text() or 0) if folder.is_dir() else 0
            expected += declared
            missing += max(0, declared - _num_bytes(folder))
    return expected, missing


def _evict(folders: Path, num_bytes: int, expected: int, missing: int) -> None:
    """Remove folders that nobody holds until ``num_bytes`` fit below the limit and on the disk."""
    limit, sizes = _limit_bytes(), _sizes(folders)

    def fits() -> bool:
        free = free_bytes(folders)
        has_space = free is None or num_bytes + missing <= free
        return has_space and sum(sizes.values()) + expected + num_bytes <= limit

    for entry in list(sizes):
        if fits():
            return
        with suppress(ServiceUnreachable), HostLock(lock_of(entry)).held(Mode.ALONE, 0.0):
            proof_of(entry).unlink(missing_ok=True)
            shutil.rmtree(entry, ignore_errors=True)
            sizes[entry] = _num_bytes(entry)
            _log.info("folder left the cache", folder=str(entry))
    if not fits():
        raise _no_room(num_bytes, sum(sizes.values()) + expected)


def _no_room(num_bytes: int, used: int) -> StorageFull:
    place = _place()
    return StorageFull(
        f"{place}: {num_bytes} bytes do not fit: {free_bytes(place)} bytes are free on the disk, "
        f"{used} of {_limit_bytes()} ({CACHE_GIB}) are in use; free space, raise the limit, or "
        f"name a folder on a larger disk in {CACHE_DIR}"
    )


def _sizes(folders: Path) -> dict[Path, int]:
    """Bytes of every kept folder; the one that was used longest ago comes first."""
    locks = sorted(folders.glob("*.lock"), key=lambda path: path.stat().st_mtime)
    entries = (path.with_suffix("") for path in locks)
    return {entry: _num_bytes(entry) for entry in entries if entry.is_dir()}


def _num_bytes(folder: Path) -> int:
    """Of the files that are there now: another process may be removing or writing them."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _remove_abandoned(base: Path) -> None:
    for lock in base.glob("*.lock"):
        with suppress(ServiceUnreachable), HostLock(lock).held(Mode.ALONE, 0.0):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)


def _made(name: str) -> Path:
    folder = _cache() / name
    with storage_errors(str(folder)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _place() -> Path:
    default = Path(tempfile.gettempdir()) / f"perdure-cache-{os.getuid()}"
    return Path(os.environ.get(CACHE_DIR) or default)


def _cache() -> Path:
    cache = _place()
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
