"""The rule of promotion: numbers of two evaluations in, a decision and its reason out."""

from typing import Any

import pytest

from activities.retraining.promotion import judge
from activities.rollout.held_out import EVAL_NAME
from models.metrics import is_declared
from models.retraining import METRICS, UNSCORED, Comparison, Decision


def comparison(**fields: Any) -> Comparison:
    given: dict[str, Any] = {
        "metric": "eval/heldout",
        "higher_is_better": True,
        "tolerance": 0.0,
        "parent": 0.5,
        "candidate": 0.75,
        "samples": 512,
        "updates": 10,
        "max_unscored_fraction": 0.0,
        "parent_unscored": 0.0,
        "candidate_unscored": 0.0,
        "data_sha256": "e" * 64,
    }
    return Comparison.model_validate({**given, **fields})


@pytest.mark.parametrize(
    ("fields", "decision", "reason"),
    [
        ({}, "promoted", "eval/heldout 0.75 after 0.5, better by 0.25, tolerance 0, n = 512"),
        ({"candidate": 0.5}, "promoted", "eval/heldout 0.5 after 0.5, better by 0, tolerance 0"),
        (
            {"candidate": 0.375},
            "refused",
            "regression: eval/heldout 0.375 after 0.5, worse by 0.125, tolerance 0",
        ),
        (
            {"candidate": 0.375, "tolerance": 0.125},
            "promoted",
            "eval/heldout 0.375 after 0.5, worse by 0.125, tolerance 0.125",
        ),
        ({"tolerance": -0.25}, "promoted", "better by 0.25, tolerance -0.25"),
        ({"tolerance": -0.375}, "refused", "better by 0.25, tolerance -0.375"),
        ({"higher_is_better": False}, "refused", "worse by 0.25"),
        ({"higher_is_better": False, "candidate": 0.25}, "promoted", "better by 0.25"),
        ({"candidate": None}, "refused", "the evaluation of the candidate has no eval/heldout"),
        ({"parent": None}, "refused", "the evaluation of the parent has no eval/heldout"),
        ({"parent_unscored": None}, "refused", "the evaluation of the parent has no"),
        (
            {"candidate_unscored": 0.25},
            "refused",
            "25.0% of the candidate's held-out samples have no score, 0.0% are allowed",
        ),
        ({"parent_unscored": 0.5}, "refused", "50.0% of the parent's held-out samples"),
        ({"candidate_unscored": 0.25, "max_unscored_fraction": 0.25}, "promoted", "better"),
    ],
)
def test_what_decides(fields: dict[str, Any], decision: str, reason: str) -> None:
    found, words = judge(comparison(**fields))
    assert found == Decision(decision)
    assert reason in words


def test_every_figure_that_decides_is_one_of_an_evaluation() -> None:
    assert all(is_declared(name) and name.startswith(f"eval/{EVAL_NAME}") for name in METRICS)
    assert UNSCORED in METRICS
