"""What of the run file reaches the workflow: evaluations in background, slow publications."""

from typing import Any

import pytest

from configs.load import resolve_document
from configs.plan import loop_plan
from models.run import LoopPlan


def plan(**sections: dict[str, Any]) -> LoopPlan:
    document: dict[str, Any] = {
        "schema_version": 1,
        "name": "planned",
        "model": {"source": "tiny", "tiny": {}},
        "data": {"tasks": [{"task": "reverse_word", "train_count": 8, "eval_count": 2}]},
        "output": {"root": "/nowhere"},
        "training": {"num_rollouts": 6},
    }
    return loop_plan(resolve_document(document | sections, origin="test").spec)


def test_evaluations_are_shared_unless_asked_for_in_background() -> None:
    assert not plan().eval_background
    asked = plan(evaluation={"mode": "background", "interval": 2, "submit_timeout_s": 7.0})
    assert asked.eval_background
    assert (asked.eval_interval, asked.eval_submit_timeout_s) == (2, 7.0)


@pytest.mark.parametrize(
    ("mode", "engines", "seconds"),
    [("barrier", 8, None), ("refresh", 8, None), ("rolling", 2, 540.0), ("rolling", 8, 1260.0)],
)
def test_a_rolling_publication_drains_and_loads_engine_after_engine(
    mode: str, engines: int, seconds: float | None
) -> None:
    """300 s for the export, then 20 s to drain and 100 s to load for each engine."""
    sections = {
        "async": {"fully_async": True},
        "core": {"publication_mode": mode},
        "inference": {
            "num_engines": engines,
            "drain_timeout_s": 20.0,
            "update_timeout_s": 100.0,
        },
    }
    assert plan(**sections).publish_timeout_s == seconds


def test_a_sequential_run_loads_all_engines_at_once() -> None:
    assert plan(inference={"num_engines": 8}).publish_timeout_s is None
