"""Processes below this one: no one of them may outlive it, and the death of a part is a death.

SGLang's server has a scheduler a GPU and a detokenizer. It does not notice every end of them: a
detokenizer that is killed leaves a server that takes requests and answers none.
"""

import asyncio
import ctypes
import os
import signal
import sys
import time

import psutil

KILL_TIMEOUT_S = 5.0
PART_PREFIX = "sglang::"
"""SGLang titles its working processes so."""
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 2, 36
_POLL_S = 0.02


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends (Linux), so that they can be found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def outlive_parent_to_clean_up() -> None:
    """Where the parent's end would kill this process (Linux), have it told to stop instead.

    Killed at once it could end nobody else; the caller handles SIGTERM.
    """
    if sys.platform != "linux":
        return
    asked, kernel = ctypes.c_int(), ctypes.CDLL(None)
    kernel.prctl(_PR_GET_PDEATHSIG, ctypes.byref(asked), 0, 0, 0)
    if asked.value == signal.SIGKILL:
        kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Live processes below this one."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if _runs(process)]


async def kill_descendants(timeout_s: float = KILL_TIMEOUT_S) -> list[int]:
    """SIGKILL to all of them until none is left; ids of those that outlive ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while (left := descendants()) and time.monotonic() < deadline:
        for process in left:
            _kill(process)
        await asyncio.sleep(_POLL_S)
    return [process.pid for process in left]


async def first_end(processes: list[psutil.Process]) -> psutil.Process:
    """The first of ``processes`` that ends; waits for ever when there are none."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[psutil.Process] = loop.create_future()
    handles: list[int] = []

    def tell(process: psutil.Process) -> None:
        if not ended.done():
            ended.set_result(process)

    try:
        for process in processes:
            try:
                handle = os.pidfd_open(process.pid)
            except ProcessLookupError:
                return process
            handles.append(handle)
            loop.add_reader(handle, tell, process)
        return await ended
    finally:
        for handle in handles:
            loop.remove_reader(handle)
            os.close(handle)


def parts() -> list[tuple[psutil.Process, str]]:
    """SGLang's working processes below this one, with their titles."""
    return [(process, title) for process in descendants() if (title := _title(process))]


def _title(process: psutil.Process) -> str:
    """``sglang::scheduler`` and the like; empty for any other process."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return ""
    return command[0] if command and command[0].startswith(PART_PREFIX) else ""


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
