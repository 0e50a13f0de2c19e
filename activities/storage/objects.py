"""An object store as fsspec shows it: what its answers mean here, and exclusive creation proved.

Every call asks over a network. A store that does not answer, is busy or fails by itself is
``ServiceUnreachable``, and so the activity that asked is tried again; missing keys and missing
buckets are ``ConfigurationError``. ``FileNotFoundError`` and ``PermissionError`` pass as they are.
"""

import errno
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from models.errors import ConfigurationError, ServiceUnreachable

_CLIENT_ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("requests", "RequestException"),
    ("gcsfs.retry", "HttpError"),
)
"""What clients of object stores raise beside ``OSError``, by module."""
_NO_KEYS = ("NoCredentialsError", "PartialCredentialsError", "NoRegionError", "ProfileNotFound")
_FAILING = (errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ECONNREFUSED)
_EXISTS = ("PreconditionFailed", "412")
_CONFLICT = ("ConditionalRequestConflict", "409")
_CONFLICTS = 20
"""Answers in a row that another creation of the same object is under way."""

_CREATING = threading.Lock()
_PROVED: set[str] = set()


class ObjectStore:
    """The calls of an fsspec file system that ``Store`` makes. Paths begin with the bucket."""

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    def exists(self, path: str) -> bool:
        """Whether an object or a folder is there."""
        return bool(self._ask(path, lambda: self._fs.exists(path)))

    def names(self, path: str) -> list[str]:
        """Paths of what lies in a folder; ``FileNotFoundError`` for none."""
        return list(self._ask(path, lambda: self._fs.ls(path, detail=False)))

    def find(self, path: str) -> list[str]:
        """Paths of every object below ``path``, or ``path`` itself."""
        return list(self._ask(path, lambda: self._fs.find(path)))

    def size(self, path: str) -> int:
        """Bytes of an object."""
        return int(self._ask(path, lambda: self._fs.size(path)))

    def read(self, path: str, end: int | None = None) -> bytes:
        """An object, or its first ``end`` bytes."""
        if end is None:
            return bytes(self._ask(path, lambda: self._fs.cat_file(path)))
        return bytes(self._ask(path, lambda: self._fs.cat_file(path, start=0, end=end)))

    def read_all(self, paths: Sequence[str]) -> list[bytes]:
        """Many small objects, asked for together, in the order of ``paths``."""
        if not paths:
            return []

        def read() -> list[bytes]:
            # unlike cat, it does not ask first whether each of them is there
            found = self._fs.cat_ranges(list(paths), None, None)
            for each in found:
                if isinstance(each, BaseException):
                    raise each
            return list(found)

        return list(self._ask(paths[0], read))

    def chunks(self, path: str, num_bytes: int) -> Iterator[bytes]:
        """An object in pieces of ``num_bytes``."""
        with answers(path), self._fs.open(path, "rb") as stream:
            while chunk := stream.read(num_bytes):
                yield chunk

    def write(self, path: str, data: bytes) -> None:
        """Replace an object; readers see the old or the new one."""
        self._change(path, lambda: self._fs.pipe_file(path, data))

    def create(self, path: str, data: bytes) -> bool:
        """Create an object unless it is there; return whether this caller created it.

        The first creation in a bucket is tried twice: a store that ignores the condition would
        let two runs own one root.
        """
        created = self._create(path, data)
        bucket = path.strip("/").partition("/")[0]
        if created and bucket not in _PROVED:
            if self._create(path, data):
                raise ConfigurationError(
                    f"{path}: this store creates an object twice: it ignores If-None-Match, on "
                    "which the ownership of an output root rests; use a store that honors it"
                )
            _PROVED.add(bucket)
        return created

    def copy(self, source: str, target: str) -> None:
        """Copy one object."""
        self._change(target, lambda: self._fs.cp_file(source, target))

    def remove(self, path: str) -> None:
        """Delete an object or everything below it."""
        self._change(path, lambda: self._fs.rm(path, recursive=True))

    def remove_all(self, paths: Sequence[str]) -> None:
        """Delete many objects together."""
        if paths:
            self._change(paths[0], lambda: self._fs.rm(list(paths)))

    def upload(self, local: str, path: str) -> None:
        """Replace an object by a file of this machine."""
        self._change(path, lambda: self._fs.put_file(local, path))

    def download(self, path: str, local: str) -> None:
        """Write an object to a file of this machine."""
        self._ask(path, lambda: self._fs.get_file(path, local))

    def _create(self, path: str, data: bytes) -> bool:
        for _ in range(_CONFLICTS):
            try:
                with answers(path), _one_at_a_time(self._fs):
                    self._fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except FileNotFoundError as error:
                raise _no_bucket(path) from error
            except ServiceUnreachable as error:
                if _code(error.__cause__) not in _CONFLICT:
                    raise
                continue
            except OSError as error:
                if _code(error) not in _EXISTS:
                    raise
                return False
            return True
        raise ServiceUnreachable(f"{path}: other creations of it have not ended")

    def _ask(self, path: str, call: Callable[[], Any]) -> Any:
        with answers(path):
            return call()

    def _change(self, path: str, call: Callable[[], Any]) -> None:
        try:
            self._ask(path, call)
        except FileNotFoundError as error:
            raise _no_bucket(path) from error


@contextmanager
def answers(path: str) -> Iterator[None]:
    """Translate what a client of an object store raises about ``path``; see the module.

    Raises:
        ServiceUnreachable: the store does not answer.
        ConfigurationError: the client has no keys.
    """
    try:
        yield
    except (FileNotFoundError, FileExistsError, PermissionError):
        raise
    except OSError as error:
        if isinstance(error, TimeoutError | ConnectionError) or error.errno in _FAILING:
            raise _silent(path, error) from error
        raise
    except _client_errors() as error:
        if type(error).__name__ in _NO_KEYS:
            raise ConfigurationError(
                f"{path}: {error}; name keys and region in the environment of every worker "
                "and Ray node (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION)"
            ) from error
        raise _silent(path, error) from error


@contextmanager
def _one_at_a_time(filesystem: Any) -> Iterator[None]:
    """memory:// looks first and writes then; its callers are threads of one process."""
    if not isinstance(filesystem, MemoryFileSystem):
        yield
        return
    with _CREATING:
        yield


def _client_errors() -> tuple[type[Exception], ...]:
    """Those of the clients that are loaded."""
    return tuple(
        getattr(sys.modules[module], name)
        for module, name in _CLIENT_ERRORS
        if module in sys.modules
    )


def _silent(path: str, error: Exception) -> ServiceUnreachable:
    return ServiceUnreachable(f"{path}: the object store does not answer: {error}")


def _no_bucket(path: str) -> ConfigurationError:
    bucket = path.strip("/").partition("/")[0]
    return ConfigurationError(
        f"cannot write {path}: there is no bucket {bucket!r}; create it, or correct output.root"
    )


def _code(error: BaseException | None) -> str:
    """Error code of the store's own answer; empty when there is none."""
    response = getattr(getattr(error, "__cause__", None), "response", None)
    return str(response["Error"].get("Code", "")) if isinstance(response, dict) else ""
