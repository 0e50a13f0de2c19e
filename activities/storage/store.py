"""The one door to an output root: a local folder or any fsspec URL.

All calls block; asynchronous callers wrap them in ``asyncio.to_thread``. Paths are relative to the
root, with forward slashes. Writes are atomic: on a local file system by temporary sibling, fsync
and rename (``atomic``), on an object store because a put is. What an object store cannot do is
said at the method: ``rename`` copies, so commit there by a marker written last, not by a rename.
"""

import hashlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec
import orjson
import structlog
from fsspec.implementations.local import LocalFileSystem

from activities.storage import atomic
from activities.storage.atomic import storage_errors
from activities.storage.objects import ObjectStore
from models.errors import ConfigurationError, ContractViolation

_CHUNK_BYTES = 1 << 20
_TAIL_BYTES = 1 << 20
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_PARTS = ".parts"
_TOGETHER = 1000
"""Objects of one request, as many as S3 deletes at once."""
_CLOCK = threading.Lock()
_NEWEST: dict[str, int] = {}
"""Of each file of rows that this process appended to: the number of its newest row."""

_log = structlog.get_logger(__name__)


class JsonlRows(NamedTuple):
    """Rows of a JSONL file in order, and how many torn lines were skipped."""

    rows: list[dict[str, Any]]
    torn_lines: int


class Store:
    """Reads and writes below one root.

    Raises ``StorageFull`` (no space), ``ConfigurationError`` (not writable, unknown URL scheme),
    ``ServiceUnreachable`` (an object store does not answer) and the plain ``FileNotFoundError`` for
    what is not there.
    """

    def __init__(self, root: str | Path) -> None:
        filesystem, self._base = _open(str(root))
        self._is_local = isinstance(filesystem, LocalFileSystem)
        self._objects = ObjectStore(filesystem)
        self._root = self._base if self._is_local else str(root).rstrip("/")

    @property
    def root(self) -> str:
        """Absolute path of a local root, else its URL."""
        return self._root

    @property
    def is_local(self) -> bool:
        """Whether files of this root have paths on this machine."""
        return self._is_local

    def local_path(self, rel: str) -> Path:
        """The path of ``rel`` on this machine; ``ConfigurationError`` for a non-local root."""
        if not self._is_local:
            raise ConfigurationError(
                f"{self._where(rel)} is an object: it has no path on this machine"
            )
        return Path(self._base) / _checked(rel)

    def exists(self, rel: str) -> bool:
        """Whether a file or folder ``rel`` is there."""
        if self._is_local:
            return self.local_path(rel).exists()
        return self._objects.exists(self._full(rel))

    def list(self, rel: str, *, hidden: bool = False) -> list[str]:
        """Sorted names in folder ``rel``; empty when it is missing.

        Names with a leading dot (temporary and staged files) only with ``hidden``.
        """
        try:
            if self._is_local:
                entries = os.listdir(self.local_path(rel))
            else:
                entries = self._objects.names(self._full(rel))
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {PurePosixPath(entry).name for entry in entries}
        return sorted(name for name in names if hidden or not name.startswith("."))

    def size(self, rel: str) -> int:
        """Bytes of the file ``rel``."""
        if self._is_local:
            return self.local_path(rel).stat().st_size
        return self._objects.size(self._full(rel))

    def sha256(self, rel: str) -> str:
        """SHA-256 hex of the file ``rel``, read in chunks."""
        digest = hashlib.sha256()
        for chunk in self._chunks(rel):
            digest.update(chunk)
        return digest.hexdigest()

    def read_bytes(self, rel: str) -> bytes:
        """The whole file ``rel``."""
        if self._is_local:
            return self.local_path(rel).read_bytes()
        return self._objects.read(self._full(rel))

    def read_head(self, rel: str, num_bytes: int) -> bytes:
        """The first ``num_bytes`` of the file ``rel``, fewer when it is shorter."""
        if self._is_local:
            with self.local_path(rel).open("rb") as stream:
                return stream.read(num_bytes)
        return self._objects.read(self._full(rel), num_bytes)

    def write_bytes(self, rel: str, data: bytes) -> None:
        """Replace the file ``rel`` atomically and durably; parents are created."""
        with storage_errors(self._where(rel)):
            if self._is_local:
                atomic.write_file(self.local_path(rel), data)
            else:
                self._objects.write(self._full(rel), data)

    def create_exclusive(self, rel: str, data: bytes) -> bool:
        """Create ``rel`` unless it exists; return whether this caller created it.

        The compare-and-swap of leases: of any number of concurrent callers one gets True.
        """
        with storage_errors(self._where(rel)):
            if self._is_local:
                return atomic.create_exclusive(self.local_path(rel), data)
            return self._objects.create(self._full(rel), data)

    def read_json(self, rel: str) -> Any:
        """The parsed file ``rel``; ``ContractViolation`` naming it when it does not parse."""
        try:
            return orjson.loads(self.read_bytes(rel))
        except orjson.JSONDecodeError as error:
            raise ContractViolation(f"{self._where(rel)} is not valid JSON: {error}") from error

    def write_json(self, rel: str, value: Any) -> None:
        """Replace ``rel`` by ``value``: keys sorted, indent 2, NaN and infinities as null."""
        options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        self.write_bytes(rel, orjson.dumps(value, option=options))

    def append_jsonl(self, rel: str, row: Mapping[str, Any]) -> None:
        """Append one line; see ``append_rows``."""
        self.append_rows(rel, (row,))

    def append_rows(self, rel: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append lines together; concurrent callers never mix their bytes. NaN becomes null.

        Local: one ``O_APPEND`` write. Object stores cannot append: there each call is an object
        ``<rel>.parts/<number>-<unique>.jsonl`` and ``read_jsonl`` joins them by number.
        """
        lines = b"\n".join(orjson.dumps(dict(row), option=orjson.OPT_SORT_KEYS) for row in rows)
        with storage_errors(self._where(rel)):
            if self._is_local:
                atomic.append_line(self.local_path(rel), lines)
            else:
                part = f"{self._next_number(rel):020d}-{uuid.uuid4().hex[:12]}.jsonl"
                self._objects.write(self._full(f"{rel}{_PARTS}/{part}"), lines + b"\n")

    def read_jsonl(self, rel: str) -> JsonlRows:
        """Rows of ``rel`` (none when it is missing). Torn lines are skipped, counted and logged.

        A line is torn when a kill cut its write: last in the file, or ended by the next append.
        """
        found = list(self._parsed(rel))
        rows = [row for row in found if row is not None]
        return JsonlRows(rows, len(found) - len(rows))

    def each_jsonl(self, rel: str) -> Iterator[dict[str, Any]]:
        """The rows of ``read_jsonl`` one by one, for whoever keeps little of each."""
        return (row for row in self._parsed(rel) if row is not None)

    def last_jsonl(self, rel: str) -> dict[str, Any] | None:
        """The newest whole row of ``rel`` without reading the rest; None when there is none.

        A row above a mebibyte is not found.
        """
        for line in reversed(self._jsonl_tail(rel).split(b"\n")):
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue  # empty, torn by a kill, or cut by the reading
            if isinstance(row, dict):
                return row
        return None

    def set_rows_aside(self, rel: str, is_wanted: Callable[[bytes], bool], target: str) -> None:
        """Of an object store: move the rows of ``rel`` that are wanted to the rows of ``target``.

        Many are read, written and deleted together, so there may be very many. A kill in between
        leaves rows in both places; repeating it ends the move.
        """
        names = self.list(rel + _PARTS)
        with storage_errors(self._where(target)):
            for begin in range(0, len(names), _TOGETHER):
                paths = self._part_paths(rel, names[begin : begin + _TOGETHER])
                parts = self._objects.read_all(paths)
                rows = {p: data.splitlines(True) for p, data in zip(paths, parts, strict=True)}
                wanted = {p: own for p in paths if (own := list(filter(is_wanted, rows[p])))}
                if not wanted:
                    continue
                moved = b"".join(line for lines in wanted.values() for line in lines)
                number = PurePosixPath(next(iter(wanted))).name.partition("-")[0]
                part = f"{number}-{hashlib.sha256(moved).hexdigest()[:12]}.jsonl"
                self._objects.write(self._full(f"{target}{_PARTS}/{part}"), moved)
                for path in wanted:
                    if rest := b"".join(row for row in rows[path] if not is_wanted(row)):
                        self._objects.write(path, rest)
                self._objects.remove_all([p for p, lines in wanted.items() if lines == rows[p]])

    def make_durable(self, rel: str) -> None:
        """Flush a local file that somebody else wrote, and its folder, to the device."""
        if self._is_local:
            with storage_errors(self._where(rel)):
                atomic.sync_file(self.local_path(rel))

    def rename(self, source: str, target: str) -> None:
        """Move a file or folder. Atomic on a local file system; a copy on object stores."""
        with storage_errors(self._where(target)):
            if self._is_local:
                origin, destination = self.local_path(source), self.local_path(target)
                atomic.make_folder(destination.parent)
                origin.rename(destination)
                atomic.sync_folder(destination.parent)
                if origin.parent != destination.parent:
                    atomic.sync_folder(origin.parent)
            else:
                self._move_objects(self._full(source), self._full(target))

    def remove_tree(self, rel: str) -> None:
        """Delete the file or folder ``rel``; nothing happens when it is missing."""
        with storage_errors(self._where(rel)):
            if self._is_local:
                path = self.local_path(rel)
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            elif self._objects.exists(self._full(rel)):
                self._objects.remove(self._full(rel))

    def put_file(self, local: Path, rel: str) -> None:
        """Copy a file of this machine to ``rel``, atomically."""
        with storage_errors(self._where(rel)):
            if self._is_local:
                atomic.copy_file(local, self.local_path(rel))
            else:
                self._objects.upload(str(local), self._full(rel))

    def get_file(self, rel: str, local: Path) -> None:
        """Copy ``rel`` to a file of this machine; parents are created."""
        with storage_errors(str(local)):
            local.parent.mkdir(parents=True, exist_ok=True)
            if self._is_local:
                shutil.copyfile(self.local_path(rel), local)
            else:
                self._objects.download(self._full(rel), str(local))

    def _move_objects(self, source: str, target: str) -> None:
        """Copy one by one, then delete: fsspec's ``mv`` asks S3 for folders, which it has not."""
        objects = self._objects.find(source)
        if not objects:
            raise FileNotFoundError(source)
        for name in objects:
            self._objects.copy(name, target + name.removeprefix(source))
        self._objects.remove(source)

    def _next_number(self, rel: str) -> int:
        """The clock in nanoseconds, and above every row that this process can know of.

        Rows of a process that ended are older, whatever the clocks of two hosts say.
        """
        key = self._full(rel)
        with _CLOCK:
            known = key in _NEWEST
        newest = 0 if known else self._newest_number(rel)
        with _CLOCK:
            number = max(time.time_ns(), _NEWEST.get(key, 0) + 1, newest + 1)
            _NEWEST[key] = number
        return number

    def _newest_number(self, rel: str) -> int:
        numbers = (name.partition("-")[0] for name in self.list(rel + _PARTS))
        return max((int(number) for number in numbers if number.isdigit()), default=0)

    def _chunks(self, rel: str) -> Iterator[bytes]:
        if not self._is_local:
            yield from self._objects.chunks(self._full(rel), _CHUNK_BYTES)
            return
        with self.local_path(rel).open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk

    def _parsed(self, rel: str) -> Iterator[dict[str, Any] | None]:
        """Every row of ``rel``; None for a torn line."""
        torn: list[int] = []
        for number, line in enumerate(self._jsonl_bytes(rel).split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                row = None
            if not isinstance(row, dict):
                torn.append(number)
            yield row if isinstance(row, dict) else None
        if torn:
            _log.warning("torn lines skipped", file=self._where(rel), lines=torn)

    def _jsonl_bytes(self, rel: str) -> bytes:
        if self._is_local:
            path = self.local_path(rel)
            return path.read_bytes() if path.exists() else b""
        return self._parts(rel, self.list(rel + _PARTS))

    def _jsonl_tail(self, rel: str) -> bytes:
        if self._is_local:
            try:
                with self.local_path(rel).open("rb") as stream:
                    stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
                    return stream.read()
            except FileNotFoundError:
                return b""
        return self._parts(rel, self.list(rel + _PARTS)[-1:])

    def _parts(self, rel: str, names: Sequence[str]) -> bytes:
        return b"".join(self._objects.read_all(self._part_paths(rel, names)))

    def _part_paths(self, rel: str, names: Sequence[str]) -> Sequence[str]:
        return [self._full(f"{rel}{_PARTS}/{name}") for name in names]

    def _full(self, rel: str) -> str:
        checked = _checked(rel)
        return f"{self._base}/{checked}" if checked else self._base

    def _where(self, rel: str) -> str:
        return f"{self._root}/{rel}" if rel else self._root


def free_bytes(root: str | Path) -> int | None:
    """Bytes that this user can still write under ``root``; None when nobody can tell.

    The nearest existing parent answers for a root that does not exist yet. Object stores and file
    systems without a size (``/proc``) do not tell.
    """
    store = Store(root)
    if not store.is_local:
        return None
    path = Path(store.root)
    while not path.exists():
        path = path.parent
    usage = shutil.disk_usage(path)
    return usage.free if usage.total else None


def _open(root: str) -> tuple[Any, str]:
    """File system and its absolute path for a root; listings are never cached."""
    protocol = fsspec.utils.get_protocol(root)
    location = str(Path(root).expanduser()) if protocol == "file" and "://" not in root else root
    try:
        filesystem, base = fsspec.core.url_to_fs(location, use_listings_cache=False)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        hint = f"install the extra perdure[{extra}]" if extra else "install its fsspec package"
        raise ConfigurationError(f"output.root {root!r}: {error}; {hint}") from error
    except ValueError as error:
        raise ConfigurationError(f"output.root {root!r}: {error}") from error
    return filesystem, str(base).rstrip("/") or "/"


def _checked(rel: str) -> str:
    """``rel`` unless it would leave the root."""
    path = PurePosixPath(rel)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{rel!r} must be a relative path inside the output root")
    return "" if rel in ("", ".") else str(path)
