"""The metrics table: every row usable, every name that the source reports declared."""

import ast
import re
from pathlib import Path

import pytest

from models.errors import ContractViolation
from models.metrics import METRICS, Metric, is_declared, refuse_undeclared

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("models", "configs", "activities", "workflows", "workers")
FIRST_PARTS = frozenset(metric.name.split("/")[0] for metric in METRICS)
METRIC_NAME = re.compile(rf"^({'|'.join(sorted(FIRST_PARTS))})(/[a-z0-9_.-]+)+$")
NOT_METRICS = re.compile(r"\.(parquet|jsonl?)$")


def test_names_are_unique() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_row_is_complete_and_its_axis_is_a_metric(metric: Metric) -> None:
    assert metric.unit
    assert metric.meaning
    assert re.fullmatch(r"[a-z_]+(/[a-z0-9_-]+)*(/\*)?", metric.name)
    assert metric.axis in {row.name for row in METRICS}


def test_one_axis_for_all_metrics_that_begin_alike() -> None:
    """W&B is told the axis of a whole section at once."""
    axes: dict[str, set[str]] = {}
    for metric in METRICS:
        axes.setdefault(metric.name.split("/")[0], set()).add(metric.axis)
    assert {name: found for name, found in axes.items() if len(found) > 1} == {}


def test_undeclared_names_are_refused_by_name() -> None:
    refuse_undeclared({"train/loss": 1.0, "rollout/dynamic_filter/zero_std_1.0": 2.0})
    with pytest.raises(ContractViolation, match="train/los'"):
        refuse_undeclared({"train/los": 1.0, "train/loss": 1.0})


def test_every_metric_name_in_the_source_is_declared() -> None:
    undeclared = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and METRIC_NAME.match(node.value)
        and not NOT_METRICS.search(node.value)
        and not is_declared(node.value)
    ]
    assert not undeclared
