"""An engine server as a child process: start it, wait until it serves, watch it, stop it.

Knows no engine: a back end gives the command line. The server writes a ready file
``{"port", "pid", "url"}`` when it serves. It dies with the process that started it.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from models.errors import ConfigurationError, EngineLost
from workers.engines import leash

CONFIGURATION_STATUS = 2
"""Exit status of a server that was asked for something it cannot do; a restart would not help."""
LOG_LINES = 20
"""Lines of the server's log that go into an error."""
_LOG_TAIL_BYTES = 16_384
_POLL_S = 0.02
_KILL_TIMEOUT_S = 5.0


class ServerExit(NamedTuple):
    """How a server ended."""

    returncode: int
    """Negative: the signal that ended it."""
    log_tail: str


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What to run."""

    name: str
    """For messages: ``engine-0``."""
    argv: tuple[str, ...]
    """The first element is an absolute path."""
    env: Mapping[str, str]
    log_path: Path
    """Appended to; earlier lives of the server may have written to it."""
    ready_file: Path


class ServerProcess:
    """One child server. Every method belongs to the event loop that started it.

    The loop's thread must live as long as the child shall: the kernel's parent-death signal fires
    when the thread that forked ends.
    """

    def __init__(self, command: ServerCommand, child: asyncio.subprocess.Process, start: int):
        self._command = command
        self._child = child
        self._log_start = start
        self._stopping = False
        self._exit = asyncio.ensure_future(self._watch())
        self.url = ""

    @classmethod
    async def start(cls, command: ServerCommand, timeout_s: float) -> "ServerProcess":
        """Start the server and return when its ready file is there.

        Raises:
            ConfigurationError: it ended with status 2: model or options are not usable.
            EngineLost: it ended otherwise, or was not ready within ``timeout_s`` seconds; the
                message holds the last lines of its log. The child is gone then.
        """
        command.ready_file.unlink(missing_ok=True)
        command.log_path.parent.mkdir(parents=True, exist_ok=True)
        with command.log_path.open("ab") as log:
            start = log.tell()
            child = await asyncio.create_subprocess_exec(
                *leashed(command.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(command.env),
                start_new_session=True,  # a group of its own; uvloop knows no process_group
            )
        server = cls(command, child, start)
        try:
            await server._until_ready(timeout_s)
        except BaseException:
            server._kill()
            await server.wait_exit()
            raise
        return server

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether it runs and nobody asked it to stop; asks the system, not the event loop."""
        return not self._exit.done() and not self._stopping and _runs(self._child.pid)

    async def wait_exit(self) -> ServerExit:
        """Return when the server has ended. Any number of callers may wait."""
        return await asyncio.shield(self._exit)

    async def stop(self, grace_s: float) -> ServerExit:
        """SIGTERM, after ``grace_s`` seconds SIGKILL to its whole process group."""
        self._stopping = True
        if not self._exit.done():
            with contextlib.suppress(ProcessLookupError):
                self._child.terminate()
            await asyncio.wait({self._exit}, timeout=grace_s)
        self._kill()
        async with asyncio.timeout(_KILL_TIMEOUT_S):
            return await self.wait_exit()

    def log_tail(self) -> str:
        """The last lines that this life of the server has logged."""
        return read_tail(self._command.log_path, self._log_start)

    async def _watch(self) -> ServerExit:
        returncode = await self._child.wait()
        self._kill()  # what the server started and left behind
        return ServerExit(returncode, self.log_tail())

    async def _until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            if (ready := _read_ready(self._command.ready_file)) is not None:
                self.url = str(ready["url"])
                return
            if self._exit.done():
                code = self._exit.result().returncode
                if code == CONFIGURATION_STATUS:
                    raise ConfigurationError(self._report("refuses to start"))
                raise EngineLost(self._report(f"ended with {_describe(code)} before it served"))
            if time.monotonic() > deadline:
                raise EngineLost(
                    self._report(
                        f"did not serve within {timeout_s:g} s (inference.start_timeout_s)"
                    )
                )
            await asyncio.sleep(_POLL_S)

    def _report(self, what: str) -> str:
        tail = self.log_tail() or "(nothing)"
        return f"{self._command.name} {what}; end of {self._command.log_path}:\n{tail}"

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)


def read_tail(path: Path, start: int = 0, lines: int = LOG_LINES) -> str:
    """The last ``lines`` lines of what ``path`` holds from byte ``start`` on."""
    try:
        with path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start, end - _LOG_TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def leashed(argv: Sequence[str]) -> tuple[str, ...]:
    """``argv`` run by a launcher that binds it to the life of this process."""
    return (sys.executable, "-I", "-S", str(leash.__file__), str(os.getpid()), *argv)


def _read_ready(path: Path) -> dict[str, object] | None:
    """Content of the ready file; None while it is missing or half-written."""
    try:
        ready = json.loads(path.read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return ready if isinstance(ready, dict) and "url" in ready else None


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _describe(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
