"""A tracker that works behind the caller's back: bounded queue, own thread, no exceptions out.

    log() -> queue (bounded, never waits) -> thread -> _record()   (the back end, may do anything)

Metrics for people's dashboards are worth a little memory and nothing else: when the back end is
slower than the run, rows are dropped and counted; when it raises, the failure is counted, logged
and forgotten. The run's own record of its metrics is the JSONL file under its output root.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from queue import Full, Queue
from typing import NamedTuple

import structlog

from models.ids import RunRef

MAX_QUEUED_ROWS = 2048
"""At a few rows an update this is hours of a hanging back end, in about a megabyte."""

_log = structlog.get_logger(__name__)


class TrackerCounts(NamedTuple):
    """What became of the rows so far."""

    recorded: int
    failed: int
    """Rows that the back end raised on."""
    dropped: int
    """Rows that met a full queue or a closed tracker."""


class _Row(NamedTuple):
    run: RunRef
    metrics: dict[str, float]


class BackgroundTracker(ABC):
    """Implements ``models.ports.Tracker`` on a thread of its own. Subclasses write one row."""

    def __init__(self, name: str, max_queued_rows: int = MAX_QUEUED_ROWS) -> None:
        self.name = name
        self._queue: Queue[_Row | None] = Queue(
            maxsize=max_queued_rows
        )  # None only wakes the thread
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._recorded = self._failed = self._dropped = 0
        self._thread: threading.Thread | None = None

    @property
    def counts(self) -> TrackerCounts:
        """What became of the rows so far."""
        with self._lock:
            return TrackerCounts(self._recorded, self._failed, self._dropped)

    def log(self, run: RunRef, metrics: Mapping[str, float]) -> None:
        """Hand one row over. Returns at once; never raises."""
        self._start()
        try:
            if self._closing.is_set():
                raise Full
            self._queue.put_nowait(_Row(run, dict(metrics)))
        except Full:
            with self._lock:
                self._dropped += 1
                dropped = self._dropped
            if _is_power_of_two(dropped):
                _log.warning("tracker rows dropped", tracker=self.name, dropped=dropped)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Flush and stop; return whether that was done within ``timeout_s``.

        Rows that are logged afterwards are dropped. A back end that hangs is left behind on its
        daemon thread.
        """
        self._closing.set()
        with suppress(Full):
            self._queue.put_nowait(None)
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        if thread.is_alive():
            _log.warning(
                "tracker did not flush in time",
                tracker=self.name,
                timeout_s=timeout_s,
                rows_left=self._queue.qsize(),
            )
        return not thread.is_alive()

    @abstractmethod
    def _record(self, run: RunRef, metrics: Mapping[str, float]) -> None:
        """Give one row to the back end. Runs on the tracker's thread; may raise anything."""

    @abstractmethod
    def _finish(self) -> None:
        """Flush and release the back end. Runs once, last, on the tracker's thread."""

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name=f"tracker-{self.name}", daemon=True
                )
                self._thread.start()

    def _work(self) -> None:
        while not (self._closing.is_set() and self._queue.empty()):
            row = self._queue.get()
            if row is not None:
                self._guarded(row)
        self._guarded(None)

    def _guarded(self, row: _Row | None) -> None:
        """Record a row, or finish when there is none; whatever goes wrong ends here."""
        try:
            if row is None:
                self._finish()
                return
            self._record(row.run, row.metrics)
        except Exception as error:
            with self._lock:
                self._failed += 1
                failed = self._failed
            if _is_power_of_two(failed):
                _log.warning("tracker failed", tracker=self.name, failed=failed, error=repr(error))
        else:
            with self._lock:
                self._recorded += 1


def _is_power_of_two(count: int) -> bool:
    """Thins out a warning that may repeat for ever: 1, 2, 4, 8 ..."""
    return count & (count - 1) == 0
