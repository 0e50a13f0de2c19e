"""Costs of an update: sums that can be done by hand."""

from pathlib import Path

import pytest

from activities.analysis.costs import UpdateCosts, update_costs
from activities.storage import layout
from activities.storage.store import Store


def test_nothing_is_known_before_the_first_update(tmp_path: Path) -> None:
    assert update_costs(Store(tmp_path)) is None


def test_a_failed_stage_and_an_evaluation_do_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    rows = [
        ("evaluation", None, 0.0, 5.0, True),
        ("generation_wait", 0, 10.0, 2.0, False),
        ("generation_wait", 0, 20.0, 2.0, True),
        ("training", 0, 22.5, 3.0, True),
        ("publication", 0, 26.0, 1.0, True),
        ("evaluation", 1, 27.0, 9.0, True),
        ("generation_wait", 1, 36.0, 2.0, True),
        ("training", 1, 38.5, 3.0, True),
        ("publication", 1, 42.0, 1.0, True),
    ]
    for stage, update, started, seconds, passed in rows:
        row = {"stage": stage, "rollout_id": update, "started_unix": started, "seconds": seconds}
        store.append_jsonl(layout.DRIVER_TIMING, {**row, "passed": passed})
    for _ in range(2):
        store.append_jsonl(layout.METRICS, {"rollout/seconds": 1.9})
        store.append_jsonl(layout.METRICS, {"train/step_seconds": 2.6})
    costs = update_costs(store)
    assert costs is not None
    assert costs.seconds_per_update == pytest.approx((43.0 - 20.0 - 9.0) / 2)
    assert costs.control_plane_share == pytest.approx((7.0 - 1.9 - 2.6 - 1.0) / 7.0)


def test_a_pause_and_the_night_before_a_resume_do_not_count(tmp_path: Path) -> None:
    """Nothing of the run happens there, so no row covers them."""
    store = Store(tmp_path)
    rows = [
        ("generation_wait", 0, 0.0, 2.0),
        ("training", 0, 2.0, 3.0),
        ("publication", 0, 5.5, 1.0),
        # paused for 100 s
        ("generation_wait", 1, 106.5, 2.0),
        ("training", 1, 108.5, 3.0),
        ("publication", 1, 112.0, 1.0),
        # stopped for a day, resumed
        ("placement", None, 86400.0, 20.0),
        ("generation_wait", 2, 86420.0, 2.0),
        ("training", 2, 86422.0, 3.0),
        ("publication", 2, 86425.5, 1.0),
    ]
    for stage, update, started, seconds in rows:
        row = {"stage": stage, "rollout_id": update, "started_unix": started, "seconds": seconds}
        store.append_jsonl(layout.DRIVER_TIMING, {**row, "passed": True})
    for _ in range(3):
        store.append_jsonl(layout.METRICS, {"rollout/seconds": 2.0, "train/step_seconds": 3.0})
    costs = update_costs(store)
    assert costs is not None
    assert costs.seconds_per_update == pytest.approx(6.5)


def test_work_side_by_side_has_no_share() -> None:
    assert UpdateCosts(2.0, 1.8, 1.9, 0.1).control_plane_share is None
