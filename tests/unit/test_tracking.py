"""The tracker's promises: never raise, never wait, count what was lost."""

import threading
from collections.abc import Mapping

import pytest

from models.ids import RunRef
from workers.tracking.background import BackgroundTracker, TrackerCounts
from workers.tracking.fan_out import FanOut

RUN = RunRef(run_id="train/a", root="/nowhere", spec_sha256="0" * 64)
DEADLINE_S = 10.0


class RecordingTracker(BackgroundTracker):
    """Keeps rows in memory; raises on the loss it is told to refuse; can be held at the gate."""

    def __init__(self, *, refuse: float | None = None, max_queued_rows: int = 100) -> None:
        super().__init__("recording", max_queued_rows)
        self.rows: list[dict[str, float]] = []
        self.refuse = refuse
        self.gate = threading.Event()
        self.gate.set()
        self.busy = threading.Event()
        self.finished = 0

    def _record(self, run: RunRef, metrics: Mapping[str, float]) -> None:
        self.busy.set()
        assert self.gate.wait(DEADLINE_S)
        if metrics["train/loss"] == self.refuse:
            raise OSError("the dashboard is gone")
        self.rows.append(dict(metrics))

    def _finish(self) -> None:
        self.finished += 1


def test_rows_arrive_in_order_and_close_flushes_them() -> None:
    tracker = RecordingTracker()
    for loss in range(50):
        tracker.log(RUN, {"train/loss": loss})
    assert tracker.close(DEADLINE_S)
    assert [row["train/loss"] for row in tracker.rows] == list(range(50))
    assert tracker.counts == TrackerCounts(recorded=50, failed=0, dropped=0)
    assert tracker.finished == 1


def test_a_raising_back_end_is_counted_and_the_next_row_is_recorded() -> None:
    tracker = RecordingTracker(refuse=1)
    for loss in (0, 1, 2):
        tracker.log(RUN, {"train/loss": loss})
    assert tracker.close(DEADLINE_S)
    assert [row["train/loss"] for row in tracker.rows] == [0, 2]
    assert tracker.counts == TrackerCounts(recorded=2, failed=1, dropped=0)


def test_a_full_queue_drops_rows_without_waiting_for_the_back_end() -> None:
    tracker = RecordingTracker(max_queued_rows=3)
    tracker.gate.clear()
    tracker.log(RUN, {"train/loss": 0})
    assert tracker.busy.wait(DEADLINE_S)  # row 0 left the queue and hangs in the back end
    for loss in range(1, 8):
        tracker.log(RUN, {"train/loss": loss})
    assert tracker.counts.dropped == 4
    tracker.gate.set()
    assert tracker.close(DEADLINE_S)
    assert [row["train/loss"] for row in tracker.rows] == [0, 1, 2, 3]


def test_close_gives_up_on_a_hanging_back_end_at_its_deadline() -> None:
    tracker = RecordingTracker()
    tracker.gate.clear()
    tracker.log(RUN, {"train/loss": 0})
    assert tracker.busy.wait(DEADLINE_S)
    assert not tracker.close(timeout_s=0.05)
    tracker.gate.set()
    assert tracker.close(DEADLINE_S)


def test_rows_after_close_are_dropped_and_counted() -> None:
    tracker = RecordingTracker()
    tracker.log(RUN, {"train/loss": 0})
    assert tracker.close(DEADLINE_S)
    tracker.log(RUN, {"train/loss": 1})
    assert tracker.counts == TrackerCounts(recorded=1, failed=0, dropped=1)


def test_close_without_any_row_starts_nothing() -> None:
    before = threading.active_count()
    assert RecordingTracker().close(timeout_s=0)
    assert threading.active_count() == before


def test_a_row_is_copied_before_the_caller_changes_it() -> None:
    tracker = RecordingTracker()
    tracker.gate.clear()
    row = {"train/loss": 1.0}
    tracker.log(RUN, row)
    row["train/loss"] = 2.0
    tracker.gate.set()
    assert tracker.close(DEADLINE_S)
    assert tracker.rows == [{"train/loss": 1.0}]


@pytest.mark.parametrize("failing", [0, 1])
def test_fan_out_reaches_every_tracker_although_one_fails(failing: int) -> None:
    trackers = [RecordingTracker(), RecordingTracker()]
    trackers[failing].refuse = 7
    fan_out = FanOut(trackers)
    fan_out.log(RUN, {"train/loss": 7})
    assert fan_out.close(DEADLINE_S)
    assert trackers[1 - failing].rows == [{"train/loss": 7}]
    assert trackers[failing].counts.failed == 1
