"""The compiler cache of one actor: where its compilers write, and the transfers both ways."""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from models.errors import ConfigurationError
from workers.engines.process import leashed

PLACE = "PERDURE_COMPILER_CACHE"
"""Folder or URL, in the environment of the Ray nodes or in ``launch.env``; unset: no cache."""
FOLDER = "PERDURE_COMPILER_CACHE_FOLDER"
"""The local copy; set for actors by whoever starts them."""
LIMIT_MIB = "PERDURE_COMPILER_CACHE_LIMIT_MIB"
DEFAULT_LIMIT_MIB = 2048
RESTORE_S = 60.0
PUBLISH_S = 240.0

_log = structlog.get_logger(__name__)

Told = Callable[[dict[str, Any]], None]


class CompilerCache:
    """The local copy of compiled kernels that one process reads and writes."""

    def __init__(self, place: str, folder: Path, limit_mib: int, role: str) -> None:
        self._place, self._folder, self._limit_mib = place, folder, limit_mib
        self._kind = f"{role}-{_built_with()}"
        self._publishing: threading.Thread | None = None

    def restore(self, timeout_s: float = RESTORE_S) -> dict[str, Any]:
        """Fetch what was published; blocks for ``timeout_s`` seconds at most and never raises."""
        return self._transfer("restore", timeout_s)

    def publish_soon(self, told: Told = lambda _: None, timeout_s: float = PUBLISH_S) -> None:
        """Publish in the background, once; ``told`` gets the result in another thread."""
        if self._publishing is not None:
            return

        def work() -> None:
            told(self._transfer("publish", timeout_s))

        self._publishing = threading.Thread(target=work, name="compiler-cache", daemon=True)
        self._publishing.start()

    def _transfer(self, work: str, timeout_s: float) -> dict[str, Any]:
        failed = {"work": work, "kind": self._kind, "outcome": "failed", "seconds": timeout_s}
        try:
            child = subprocess.Popen(
                leashed(self._command(work)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=self._environment(),
            )
        except OSError as error:
            return failed | {"reason": str(error)}
        try:
            output, _ = child.communicate(timeout=timeout_s)
            result = json.loads(output)
        except subprocess.TimeoutExpired:
            # One that hangs in the kernel outlives even this; nobody waits for it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            threading.Thread(target=child.communicate, daemon=True).start()
            result = failed | {"reason": f"no end within {timeout_s:g} s"}
        except ValueError:
            result = failed | {"reason": f"the transfer ended with status {child.returncode}"}
        _log.info("compiler cache", **result)
        return result

    @staticmethod
    def _environment() -> dict[str, str]:
        """That of this process, whose modules may lie outside of the site folders."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def _command(self, work: str) -> list[str]:
        return [
            *(sys.executable, "-m", "workers.compiler_cache", work, "--place", self._place),
            *("--kind", self._kind, "--folder", str(self._folder)),
            *("--max-bytes", str(self._limit_mib << 20)),
        ]


def cache_variables(name: str, scratch: Path, told: Mapping[str, str]) -> dict[str, str]:
    """What the process of an actor gets in its environment; nothing where no place is named.

    Args:
        name: of the actor.
        scratch: its folder on this host.
        told: variables as it will see them.
    """
    if not told.get(PLACE):
        return {}
    folder = scratch / f"compiler-{name}"
    return {
        FOLDER: str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def compiler_cache(role: str, told: Mapping[str, str]) -> CompilerCache | None:
    """The cache of this process, of which ``told`` is the environment; None where it has none.

    Raises:
        ConfigurationError: the limit is no whole number of MiB.
    """
    place, folder = told.get(PLACE), told.get(FOLDER)
    if not place or not folder:
        return None
    limit = told.get(LIMIT_MIB) or str(DEFAULT_LIMIT_MIB)
    if not limit.isdecimal() or not int(limit):
        raise ConfigurationError(f"{LIMIT_MIB}={limit!r} is no whole number of MiB above 0")
    kind = f"{role}-{'gpu' if told.get('CUDA_VISIBLE_DEVICES') else 'cpu'}"
    return CompilerCache(place, Path(folder), int(limit), kind)


def _built_with() -> str:
    """What compiled code depends on, as a folder's name; a compiler's own keys tell the rest."""
    versions = []
    for package in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package}{importlib.metadata.version(package)}")
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join((*versions, python, platform.machine())))
