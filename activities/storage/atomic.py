"""Durable file operations on a local file system: whole content or nothing, even on a power cut.

A file is written to a temporary sibling, fsynced, renamed, and its folder is fsynced. ``OSError``
leaves are translated by ``storage_errors``: no space -> ``StorageFull``; not permitted, read-only
or a file where a folder must be -> ``ConfigurationError``. Others pass unchanged.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from models.errors import ConfigurationError, StorageFull

_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
_REFUSED = frozenset((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR))
_NO_HARD_LINKS = frozenset((errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV))


@contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Translate the ``OSError`` of a write to ``where`` (a path or URL, for the message)."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(
                f"no space left to write {where} ({error.strerror}); free space or raise the quota,"
                " then start the run again: the last committed checkpoint is intact"
            ) from error
        if error.errno in _REFUSED or isinstance(error, PermissionError):
            raise ConfigurationError(
                f"cannot write {where}: {error.strerror or error}; "
                "choose an output.root that this user can write to"
            ) from error
        raise


def sync_folder(folder: Path) -> None:
    """Make renames, creations and removals inside ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the content and the name of a finished file durable."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its missing parents, each made durable in its own parent."""
    missing: list[Path] = []
    current = folder
    while not current.is_dir():
        missing.append(current)
        current = current.parent
    for path in reversed(missing):
        try:
            path.mkdir()
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise  # removed meanwhile
            raise PermissionError(
                errno.EACCES, "this file system takes no new folders", str(path)
            ) from None
        except FileExistsError:
            if not path.is_dir():
                raise NotADirectoryError(
                    errno.ENOTDIR, f"{path} is a file where a folder must be"
                ) from None
        sync_folder(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``; a reader sees the old or the new content, never a part."""
    with _staged(path) as (temporary, stream):
        stream.write(data)
        _flush(stream)
        os.replace(temporary, path)
    sync_folder(path.parent)


def copy_file(source: Path, path: Path) -> None:
    """Replace ``path`` by the content of ``source``, as ``write_file`` does."""
    with _staged(path) as (temporary, stream):
        with source.open("rb") as content:
            shutil.copyfileobj(content, stream, 1 << 20)
        _flush(stream)
        os.replace(temporary, path)
    sync_folder(path.parent)


def create_exclusive(path: Path, data: bytes) -> bool:
    """Create ``path`` with ``data`` unless it exists; return whether this caller created it.

    The content is linked into place whole: a kill never leaves an empty claim behind.
    """
    with _staged(path) as (temporary, stream):
        stream.write(data)
        _flush(stream)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            if not _create_in_place(path, data):
                return False
    sync_folder(path.parent)
    return True


def append_line(path: Path, line: bytes) -> None:
    """Append ``line`` and LF by one ``O_APPEND`` write; a torn last line is ended first.

    Survives a kill of the process at any point; not fsynced, so a power cut may lose the tail.
    """
    make_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = (b"\n" if torn else b"") + line + b"\n"
        written = 0
        while written < len(data):
            written += os.write(descriptor, data[written:])
    finally:
        os.close(descriptor)


@contextmanager
def _staged(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """An open temporary sibling of ``path`` that is gone afterwards, whatever happened."""
    make_folder(path.parent)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        with temporary.open("xb") as stream:
            yield temporary, stream
    finally:
        temporary.unlink(missing_ok=True)


def _flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _create_in_place(path: Path, data: bytes) -> bool:
    """Exclusive creation where the file system has no hard links."""
    try:
        with path.open("xb") as stream:
            stream.write(data)
            _flush(stream)
    except FileExistsError:
        return False
    return True
