"""A supervised process: started or adopted, watched through a pidfd, ended with its session."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import structlog

from workers.local_stack.state import ProcessStatus

log = structlog.get_logger(__name__)


_SAME_START_S = 2.0
"""Creation times this close are of one process: clocks are set, no pid is reused so soon."""


def is_alive(pid: int, create_time: float) -> bool:
    """Whether that very process runs; a zombie or a reused pid does not count."""
    try:
        process = psutil.Process(pid)
        return _is_same(process, create_time) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Child:
    """One live process in a session of its own, ours or adopted from an earlier supervisor."""

    def __init__(
        self, name: str, pid: int, create_time: float, popen: subprocess.Popen[bytes] | None
    ) -> None:
        self.name = name
        self.pid = pid
        self.create_time = create_time
        self._popen = popen

    @classmethod
    def start(
        cls, name: str, argv: tuple[str, ...], env: dict[str, str], log_path: Path
    ) -> "Child":
        """Start ``argv`` in a new session with its output appended to ``log_path``."""
        with log_path.open("ab") as stream:
            popen = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd="/",
            )
        return cls(name, popen.pid, psutil.Process(popen.pid).create_time(), popen)

    @classmethod
    def adopt(cls, status: ProcessStatus) -> "Child | None":
        """Take over a process that an earlier supervisor started, if it still lives."""
        if not is_alive(status.pid, status.create_time):
            return None
        return cls(status.name, status.pid, status.create_time, None)

    async def wait(self) -> str:
        """Wait until the process ends; works for adopted ones too. Returns how it ended."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return self._describe_end()
        try:
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self._describe_end()

    def _describe_end(self) -> str:
        if self._popen is None:
            return "ended"
        code = self._popen.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after ``grace_s`` seconds, then whatever its session left."""
        if is_alive(self.pid, self.create_time):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(self.wait(), grace_s)
            except TimeoutError:
                log.warning("killed after its grace period", service=self.name, grace_s=grace_s)
                os.kill(self.pid, signal.SIGKILL)
                await asyncio.wait_for(self.wait(), grace_s)
        kill_session(self.pid, self.create_time)


def kill_session(session: int, create_time: float) -> None:
    """SIGKILL every process of the session that a process of ours led, created at ``create_time``.

    Nothing happens when the number may mean another session by now: after a reboot, or when
    another process has it as its pid. The kernel gives away no pid that a session still has.
    """
    if create_time < psutil.boot_time() - _SAME_START_S or _is_reused(session, create_time):
        return
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(process.pid) == session:
                os.kill(process.pid, signal.SIGKILL)


def _is_reused(pid: int, create_time: float) -> bool:
    try:
        return not _is_same(psutil.Process(pid), create_time)
    except psutil.NoSuchProcess:
        return False


def _is_same(process: psutil.Process, create_time: float) -> bool:
    return abs(process.create_time() - create_time) < _SAME_START_S


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log file, for an error message."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 8192))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def wait_dead(pid: int, create_time: float, timeout_s: float) -> bool:
    """Block until the process is gone; False at the deadline."""
    deadline = time.monotonic() + timeout_s
    while is_alive(pid, create_time):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
