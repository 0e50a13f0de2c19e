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
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from models.errors import ConfigurationError
from workers.engines.process import leashed

PLACE = "PERDURE_COMPILER_CACHE"
"""Folder or URL, in the environment of the Ray nodes or in ``launch.env``; unset: no cache."""
FOLDER = "PERDURE_COMPILER_CACHE_FOLDER"
"""The local copy; set for actors by whoever starts them."""
LIMIT_MIB = "PERDURE_COMPILER_CACHE_LIMIT_MIB"
"""Of one archive; ``DEFAULT_LIMIT_MIB`` unless set, as are the next two."""
DEFAULT_LIMIT_MIB = 2048
TOTAL_MIB = "PERDURE_COMPILER_CACHE_TOTAL_MIB"
"""Of all archives of the place."""
DEFAULT_TOTAL_MIB = 8192
INTERVAL_S = "PERDURE_COMPILER_CACHE_INTERVAL_S"
"""Between two publications of a process."""
DEFAULT_INTERVAL_S = 600
RESTORE_S = 60.0
PUBLISH_S = 240.0

_log = structlog.get_logger(__name__)

Told = Callable[[dict[str, Any]], None]


class Terms(NamedTuple):
    """How much and how often is published."""

    limit_mib: int = DEFAULT_LIMIT_MIB
    total_mib: int = DEFAULT_TOTAL_MIB
    interval_s: float = DEFAULT_INTERVAL_S


class CompilerCache:
    """The local copy of compiled kernels that one process reads and writes."""

    def __init__(self, place: str, folder: Path, role: str, terms: Terms = Terms()) -> None:  # noqa: B008
        self._place, self._folder, self._terms = place, folder, terms
        self._kind = f"{role}-{_built_with()}"
        self._due = time.monotonic() + terms.interval_s
        self._publishing = threading.Lock()

    def restore(self, timeout_s: float = RESTORE_S) -> dict[str, Any]:
        """Fetch what was published; blocks for ``timeout_s`` seconds at most and never raises."""
        return self._transfer("restore", timeout_s)

    def publish(self, timeout_s: float = PUBLISH_S) -> dict[str, Any]:
        """Publish now; blocks for ``timeout_s`` seconds at most and never raises."""
        deadline = time.monotonic() + timeout_s
        if not self._publishing.acquire(timeout=timeout_s):
            reason = f"one before it had no end within {timeout_s:g} s"
            return self._failed("publish", timeout_s) | {"reason": reason}
        try:
            return self._transfer("publish", deadline - time.monotonic())
        finally:
            self._publishing.release()

    def publish_if_due(self, told: Told) -> None:
        """Publish in the background when it is time; ``told`` gets the result in another thread."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._terms.interval_s
            self._in_background(lambda: told(self.publish()))

    def publish_regularly(self, over: threading.Event) -> None:
        """Publish in the background from now on until ``over`` is set or this process ends."""

        def work() -> None:
            while not over.wait(self._terms.interval_s):
                self.publish()

        self._in_background(work)

    @staticmethod
    def _in_background(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="compiler-cache", daemon=True).start()

    def _transfer(self, work: str, timeout_s: float) -> dict[str, Any]:
        failed = self._failed(work, timeout_s)
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

    def _failed(self, work: str, seconds: float) -> dict[str, Any]:
        return {"work": work, "kind": self._kind, "outcome": "failed", "seconds": seconds}

    @staticmethod
    def _environment() -> dict[str, str]:
        """That of this process, whose modules may lie outside of the site folders."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def _command(self, work: str) -> list[str]:
        return [
            *(sys.executable, "-m", "workers.compiler_cache", work, "--place", self._place),
            *("--kind", self._kind, "--folder", str(self._folder)),
            *("--max-bytes", str(self._terms.limit_mib << 20)),
            *("--max-total-bytes", str(self._terms.total_mib << 20)),
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
        ConfigurationError: a limit or the interval is no whole number above 0.
    """
    place, folder = told.get(PLACE), told.get(FOLDER)
    if not place or not folder:
        return None
    terms = Terms(
        _positive(told, LIMIT_MIB, DEFAULT_LIMIT_MIB, "MiB"),
        _positive(told, TOTAL_MIB, DEFAULT_TOTAL_MIB, "MiB"),
        _positive(told, INTERVAL_S, DEFAULT_INTERVAL_S, "seconds"),
    )
    kind = f"{role}-{'gpu' if told.get('CUDA_VISIBLE_DEVICES') else 'cpu'}"
    return CompilerCache(place, Path(folder), kind, terms)


def _positive(told: Mapping[str, str], name: str, default: int, unit: str) -> int:
    text = told.get(name) or str(default)
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ConfigurationError(f"{name}={text!r} is no whole number of {unit} above 0")
    return int(text)


def _built_with() -> str:
    """What compiled code depends on, as a folder's name; a compiler's own keys tell the rest."""
    versions = []
    for package in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package}{importlib.metadata.version(package)}")
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join((*versions, python, platform.machine())))
