"""Locks between processes of one host, on files. The kernel frees those of a process that ends."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from models.errors import ServiceUnreachable

_POLL_S = 0.05


class Mode(IntEnum):
    """Who else may hold the lock."""

    SHARED = fcntl.LOCK_SH
    ALONE = fcntl.LOCK_EX


class HostLock:
    """The lock on one file, made if missing. Not for use by several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def take(self, mode: Mode, timeout_s: float) -> None:
        """Hold it, or raise ``ServiceUnreachable`` after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if self._locked(descriptor, mode):
                self._descriptor = descriptor
                return
            os.close(descriptor)
            if time.monotonic() >= deadline:
                raise ServiceUnreachable(
                    f"{self.path} is held by other processes of this host; end what uses it"
                )
            time.sleep(_POLL_S)

    def give_up(self) -> None:
        """Hold it no longer."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @contextmanager
    def held(self, mode: Mode, timeout_s: float) -> Iterator[None]:
        """Hold it within the block."""
        self.take(mode, timeout_s)
        try:
            yield
        finally:
            self.give_up()

    def _locked(self, descriptor: int, mode: Mode) -> bool:
        """Whether the file, if it is still the one of that name, is locked now."""
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        own = os.fstat(descriptor)
        return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)
