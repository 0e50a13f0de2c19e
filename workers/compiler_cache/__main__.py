"""``python -m workers.compiler_cache restore|publish``: one transfer, its result as a line of JSON.

A process of its own, so that whoever asked for it can leave storage that hangs behind. At most two
publish at a time on a host.
"""

import argparse
import contextlib
import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from activities.storage.store import Store
from models.errors import PerdureError
from workers.compiler_cache.archive import DamagedArchive
from workers.compiler_cache.place import Limits, publish, restore

PUBLISHERS = 2


def main(arguments: list[str]) -> int:
    """Always 0: the line says what became of it."""
    parser = argparse.ArgumentParser(prog="python -m workers.compiler_cache")
    parser.add_argument("work", choices=("restore", "publish"))
    parser.add_argument("--place", required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--max-bytes", type=int, required=True, help="of one archive")
    parser.add_argument("--max-total-bytes", type=int, required=True, help="of all archives")
    told = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        result = _done(told)
    except (DamagedArchive, PerdureError, OSError, ValueError) as error:
        result = {"outcome": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}
    result |= {"work": told.work, "kind": told.kind, "seconds": time.monotonic() - started}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def _done(told: argparse.Namespace) -> dict[str, Any]:
    told.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=told.folder.parent, prefix=".transfer-") as scratch:
        if told.work == "restore":
            return restore(Store(told.place), told.kind, told.folder, Path(scratch))
        with _slot() as free:
            if not free:
                return {"outcome": "busy"}
            limits = Limits(told.max_bytes, told.max_total_bytes)
            return publish(Store(told.place), told.kind, told.folder, Path(scratch), limits)


@contextlib.contextmanager
def _slot() -> Iterator[bool]:
    """Whether this is one of the publishers that a host may have; the kernel gives slots back."""
    base = Path(tempfile.gettempdir()) / f"perdure-compiler-cache-{os.getuid()}"
    with contextlib.ExitStack() as held:
        for number in range(PUBLISHERS):
            stream = held.enter_context(base.with_suffix(f".{number}.lock").open("a"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
                return
        yield False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
