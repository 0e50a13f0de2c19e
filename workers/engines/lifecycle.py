"""The process around the server: its socket, its ready file, and the death of its parent."""

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

from models.errors import ConfigurationError

PR_SET_PDEATHSIG = 1
PARENT_POLL_S = 1.0
BACKLOG = 1024


def follow_parent() -> None:
    """End this process when its parent process ends (Linux; elsewhere ``watch_parent`` does).

    The kernel signals when the *thread* that started us ends, which is not the process's end:
    so the handler compares parent ids, and only an orphan exits.
    """
    parent = os.getppid()

    def on_signal(_signum: int, _frame: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGUSR2, on_signal)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGUSR2, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


async def watch_parent() -> None:
    """Look at the parent id once a second and exit when it changes."""
    parent = os.getppid()
    while True:
        await asyncio.sleep(PARENT_POLL_S)
        if os.getppid() != parent:
            os._exit(1)


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises ConfigurationError for an address that is taken or foreign."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, every answer
    # waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigurationError(f"cannot listen on {host} port {port}: {reason}") from error
    return listener


def write_ready_file(path: Path, host: str, port: int) -> None:
    """Atomically write {port, pid, url}: whoever sees the file may connect."""
    shown = f"[{host}]" if ":" in host else host
    body = {"port": port, "pid": os.getpid(), "url": f"http://{shown}:{port}"}
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(body) + "\n", encoding="utf-8")
    draft.replace(path)
