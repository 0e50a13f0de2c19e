"""The shared place: a folder or an fsspec URL with one pointer and a few archives a kind.

``KIND/CURRENT.json`` names an archive beside it with its digest, and is replaced as a whole, last.
Several may publish at once: each pointer is valid, and the last one stays. An archive is removed an
hour later, when two newer ones are there or when the archives of all kinds together are too large.
"""

import contextlib
import hashlib
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from activities.storage.store import Store
from models.errors import ContractViolation
from workers.compiler_cache.archive import DamagedArchive, pack, shared_files, unpack

CURRENT = "CURRENT.json"
_ARCHIVE = ".tar.gz"
KEPT_ARCHIVES = 2
SETTLED_S = 3600.0
"""A younger archive may be one whose publisher has yet to point to it, or that somebody reads."""


def restore(place: Store, kind: str, folder: Path, scratch: Path) -> dict[str, Any]:
    """Bring the current archive of ``kind`` into ``folder``; what was done, as JSON.

    Raises:
        DamagedArchive: pointer or archive is torn, or its digest differs.
        OSError, PerdureError: the place or the disk refuses.
    """
    pointer = _pointer(place, kind)
    if pointer is None:
        return {"outcome": "miss", "files": 0}
    archive = scratch / f"restored-{uuid.uuid4().hex}.tar.gz"
    try:
        content = place.read_bytes(f"{kind}/{_archive_name(pointer)}")
        if hashlib.sha256(content).hexdigest() != pointer.get("sha256"):
            raise DamagedArchive(f"the archive of {kind} is not the one that was published")
        archive.write_bytes(content)
        return {"outcome": "hit", "files": unpack(archive, folder), "bytes": len(content)}
    finally:
        archive.unlink(missing_ok=True)


class Limits(NamedTuple):
    """Bytes that a publication respects."""

    archive: int
    """Of the files in one archive."""
    place: int
    """Of the archives of all kinds, once they are an hour old; the newest always stays."""


def publish(place: Store, kind: str, folder: Path, scratch: Path, limits: Limits) -> dict[str, Any]:
    """Put ``folder`` and what is current together into a new archive, and make that the current.

    Raises: see ``restore``; nothing is published then.
    """
    own = {str(path) for path in shared_files(folder)}
    try:
        pointer = _pointer(place, kind)
    except DamagedArchive:
        pointer = None
    if not own or (pointer is not None and _holds(place, kind, pointer, own)):
        return {"outcome": "unchanged", "files": len(own)}
    # What is there comes into the process's own folder, where it would look for it anyway; what is
    # damaged is replaced by an archive that is whole.
    with contextlib.suppress(DamagedArchive, FileNotFoundError):
        restore(place, kind, folder, scratch)
    archive = scratch / f"published-{uuid.uuid4().hex}.tar.gz"
    try:
        files = pack(folder, archive, limits.archive)
        content = archive.read_bytes()
    finally:
        archive.unlink(missing_ok=True)
    digest = hashlib.sha256(content).hexdigest()
    name = f"{time.time_ns():020d}-{digest[:16]}.tar.gz"
    place.write_bytes(f"{kind}/{name}", content)
    names = sorted(str(path) for path in shared_files(folder))
    pointed = {"archive": name, "sha256": digest, "bytes": len(content), "names": names}
    place.write_json(f"{kind}/{CURRENT}", pointed)
    for old in _left_behind(place.list(kind), time.time_ns()):
        place.remove_tree(f"{kind}/{old}")
    _shrink(place, limits.place)
    return {"outcome": "published", "files": files, "bytes": len(content)}


def _pointer(place: Store, kind: str) -> dict[str, Any] | None:
    """What is current; None when nothing is."""
    try:
        pointer = place.read_json(f"{kind}/{CURRENT}")
    except FileNotFoundError:
        return None
    except ContractViolation as error:
        raise DamagedArchive(f"the pointer of {kind} is torn: {error.message}") from error
    return pointer if isinstance(pointer, dict) else None


def _left_behind(names: list[str], now_ns: int) -> list[str]:
    """Archives that nobody needs any more: their names begin with the time of their making."""
    archives = sorted(name for name in names if name.endswith(_ARCHIVE))
    return [name for name in archives[:-KEPT_ARCHIVES] if _is_settled(name, now_ns)]


def _shrink(place: Store, max_bytes: int) -> None:
    """Remove archives of any kind, oldest first, until the others have ``max_bytes`` or fewer."""
    found = [
        (name, kind)
        for kind in place.list("")
        for name in place.list(kind)
        if name.endswith(_ARCHIVE)
    ]
    total, now_ns = 0, time.time_ns()
    for index, (name, kind) in enumerate(sorted(found, reverse=True)):
        with contextlib.suppress(FileNotFoundError):  # another publisher was faster
            total += place.size(f"{kind}/{name}")
            if index and total > max_bytes and _is_settled(name, now_ns):
                with contextlib.suppress(DamagedArchive):
                    if (_pointer(place, kind) or {}).get("archive") == name:
                        place.remove_tree(f"{kind}/{CURRENT}")
                place.remove_tree(f"{kind}/{name}")


def _is_settled(name: str, now_ns: int) -> bool:
    return name[:20].isdecimal() and now_ns - int(name[:20]) > SETTLED_S * 1e9


def _holds(place: Store, kind: str, pointer: dict[str, Any], names: set[str]) -> bool:
    """Whether the current archive is there and has all of ``names``."""
    listed = pointer.get("names")
    there = f"{pointer.get('archive')}" in place.list(kind)
    return there and isinstance(listed, list) and names.issubset(listed)


def _archive_name(pointer: dict[str, Any]) -> str:
    name = str(pointer.get("archive", ""))
    if not name.endswith(_ARCHIVE) or "/" in name or name.startswith("."):
        raise DamagedArchive(f"the pointer names {name!r}")
    return name
