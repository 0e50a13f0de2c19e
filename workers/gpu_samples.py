"""Rows of ``gpu_usage_NODE.jsonl``: every GPU of this machine, looked at again and again."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from activities.storage.store import Store

LOOK_LIMIT_S = 10.0
"""For one answer of the driver; one that hangs must not end the sampling."""

Look = Callable[[], list[dict[str, Any]]]


class PatientLook:
    """Looks with a deadline. While one look hangs no other begins."""

    def __init__(self, look: Look, limit_s: float = LOOK_LIMIT_S) -> None:
        self._look = look
        self._limit_s = limit_s
        self._pending: SimpleQueue[list[dict[str, Any]] | ConnectionError] | None = None

    def row(self) -> dict[str, Any]:
        """``devices``, or the ``error`` that kept them unknown."""
        if self._pending is None:
            self._pending = SimpleQueue()
            # A daemon: a driver that never answers must not keep the process alive.
            threading.Thread(target=self._ask, args=(self._pending,), daemon=True).start()
        try:
            found = self._pending.get(timeout=self._limit_s)
        except Empty:
            return {"error": f"the driver did not answer within {self._limit_s:g} s"}
        self._pending = None
        return {"error": str(found)} if isinstance(found, ConnectionError) else {"devices": found}

    def _ask(self, answer: "SimpleQueue[list[dict[str, Any]] | ConnectionError]") -> None:
        try:
            answer.put(self._look())
        except ConnectionError as error:
            answer.put(error)


def sample_gpus(
    output: str,
    look: Look,
    *,
    seconds: float,
    interval: float,
    triton_cache_parent: Path | None = None,
    limit_s: float = LOOK_LIMIT_S,
) -> int:
    """Append a row to ``output`` every ``interval`` seconds for ``seconds``; the number of rows.

    Args:
        output: a path, or a URL of an object store.
        look: asks for the rows of all GPUs; raises ``ConnectionError`` when nobody answers.
        seconds: from the first look on; there is at least one.
        interval: between the begins of two looks.
        triton_cache_parent: a folder whose folders are compiler caches of workers.
        limit_s: for one look.
    """
    folder, _, name = output.rpartition("/")
    store = Store(folder or ("/" if output.startswith("/") else "."))
    patient, pause = PatientLook(look, limit_s), threading.Event()
    host, began, rows = socket.gethostname(), time.monotonic(), 0
    while True:
        row = {"time_unix": time.time(), "host": host, **patient.row()}
        if triton_cache_parent is not None:
            row["triton_artifacts"] = triton_artifacts(triton_cache_parent)
        store.append_jsonl(name, row)
        rows += 1
        passed = time.monotonic() - began
        following = (passed // interval + 1) * interval
        pause.wait(max(0.0, min(following, seconds) - passed))
        if following >= seconds:
            return rows


def triton_artifacts(parent: Path) -> list[dict[str, Any]]:
    """For each folder of ``parent``: compiled kernels, and when the newest was written.

    Symbolic links are passed over: what they lead to belongs to somebody else.
    """
    with suppress(FileNotFoundError):
        roots = [root for root in parent.iterdir() if root.is_dir() and not root.is_symlink()]
        return [_artifacts(root) for root in sorted(roots)]
    return []


def _artifacts(root: Path) -> dict[str, Any]:
    written: list[float] = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            with suppress(FileNotFoundError):  # caches are written and cleaned meanwhile
                if name.endswith(".cubin") and not path.is_symlink():
                    written.append(path.stat().st_mtime)
    return {
        "root": str(root),
        "cubins": len(written),
        "newest_write_unix": max(written, default=None),
    }
