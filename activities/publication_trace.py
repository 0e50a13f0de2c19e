"""Where a publication spends its time; on request with progress lines and stacks of what hangs."""

import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import structlog

from models.errors import ConfigurationError

NAMES = ("PERDURE_PUBLICATION_DIAGNOSTICS", "OI_MILES_PUBLICATION_DIAGNOSTICS")
"""Either name, in the environment or in ``launch.env``; "1" turns the diagnostics on."""

BOUNDARY = "boundary"
"""The part that heals the fleet and closes the producer's boundary."""

STACKS_EVERY_S = 60.0
"""Longest silence of a publication before the stacks of all threads are logged, and again."""

_JOIN_TIMEOUT_S = 5.0

_log = structlog.get_logger(__name__)


def diagnostics_wanted(
    launch_env: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> bool:
    """Whether publications tell of every step. Off unless asked for.

    Raises:
        ConfigurationError: the names, or the two places, say different things, or neither 0 nor 1.
    """
    places = (os.environ if environment is None else environment, launch_env)
    given = {place[name] for place in places for name in NAMES if place.get(name)}
    if len(given) > 1 or given - {"0", "1"}:
        raise ConfigurationError(
            f"{' and '.join(NAMES)} say {sorted(given)} in the environment and launch.env: set one "
            "of them to 1 or 0, or all to the same"
        )
    return given == {"1"}


class PublicationTrace:
    """Seconds by part of one publication; ``verbose`` also logs where each part begins and ends."""

    def __init__(self, version: int, *, verbose: bool = False) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Part -> seconds spent there, summed over its visits."""
        self._started = time.monotonic()
        self._log = _log.bind(version=version, pid=os.getpid())
        self._verbose = verbose

    @property
    def total_seconds(self) -> float:
        """Seconds since the trace was made."""
        return time.monotonic() - self._started

    @contextmanager
    def part(self, name: str, **details: object) -> Iterator[None]:
        """Count what the block takes towards ``name``."""
        started = time.monotonic()
        with self.step(name, **details):
            try:
                yield
            finally:
                self.seconds[name] += time.monotonic() - started

    @contextmanager
    def step(self, name: str, **details: object) -> Iterator[None]:
        """Tell of the block without counting it: parts of one time run at once."""
        if not self._verbose:
            yield
            return
        started = time.monotonic()
        self._log.info(f"{name}_start", **details)
        try:
            yield
        except BaseException as error:
            seconds = time.monotonic() - started
            self._log.info(f"{name}_error", seconds=seconds, error=repr(error), **details)
            raise
        self._log.info(f"{name}_complete", seconds=time.monotonic() - started, **details)

    @contextmanager
    def watched(self, every_s: float | None = None) -> Iterator[None]:
        """Log the stacks of all threads every ``every_s`` (60) seconds until the block ends.

        A thread of its own does it, so a blocked event loop is seen as well.
        """
        if not self._verbose:
            yield
            return
        over = threading.Event()

        def watch() -> None:
            while not over.wait(every_s or STACKS_EVERY_S):
                self._log.warning("publication_stacks", stacks=_stacks())

        watcher = threading.Thread(target=watch, name="publication-watchdog", daemon=True)
        watcher.start()
        try:
            with self.step("update"):
                yield
        finally:
            over.set()
            watcher.join(_JOIN_TIMEOUT_S)


def _stacks() -> str:
    """Stacks of all threads but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
    )
