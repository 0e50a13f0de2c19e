"""Several trackers behind the one that the rest of Perdure sees."""

import time
from collections.abc import Mapping, Sequence

from models.ids import RunRef
from workers.tracking.background import BackgroundTracker


class FanOut:
    """Implements ``models.ports.Tracker``: every row goes to every tracker, none waits."""

    def __init__(self, trackers: Sequence[BackgroundTracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, run: RunRef, metrics: Mapping[str, float]) -> None:
        """Record one row everywhere."""
        for tracker in self._trackers:
            tracker.log(run, metrics)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Flush all within ``timeout_s`` together; return whether all were flushed."""
        deadline = time.monotonic() + timeout_s
        flushed = [
            tracker.close(max(0.0, deadline - time.monotonic())) for tracker in self._trackers
        ]
        return all(flushed)
