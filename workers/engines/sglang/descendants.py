"""Processes below this one: no one of them may outlive it, and the death of a part is a death.

SGLang's server has a scheduler a GPU and a detokenizer. It does not notice every end of them: a
detokenizer that is killed leaves a server that takes requests and answers none.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time

import psutil

KILL_TIMEOUT_S = 10.0
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


async def end_descendants(
    child: asyncio.subprocess.Process, timeout_s: float = KILL_TIMEOUT_S
) -> list[int]:
    """SIGKILL to everything below this process; returns when all of it is gone from the system.

    A process of many threads is a zombie before its last thread has given its GPU back, and gone
    only afterwards.

    Args:
        child: the only process that was started here; the others are adopted.
        timeout_s: for all of them together.

    Returns:
        Ids of processes that are still there.
    """
    deadline = time.monotonic() + timeout_s
    _kill_all()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await child.wait()
    while (left := _below()) and time.monotonic() < deadline:
        _kill_all()
        _reap_adopted()
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
    return [(process, title) for process in _below() if (title := _title(process))]


def _title(process: psutil.Process) -> str:
    """``sglang::scheduler`` and the like; empty for any other process."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return ""
    return command[0] if command and command[0].startswith(PART_PREFIX) else ""


def _below() -> list[psutil.Process]:
    return list(psutil.Process().children(recursive=True))


def _kill_all() -> None:
    for process in _below():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _reap_adopted() -> None:
    """Take the exit status of every child that has ended; nobody else would."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
