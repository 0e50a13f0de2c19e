"""What a fully async producer may have in flight, and what `plan` says of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.capacity import (
    automatic_concurrent_samples,
    completed_groups_capacity,
    concurrent_groups,
)
from configs.capacity_report import SCOPE, capacity_report
from configs.load import load_run
from configs.plan import build_plan
from configs.run import RunSpec

# 8 prompts x 8 samples, K = 1, lag 6, two engines with 64 open calls and 64 running ones each
BASE: dict[str, Any] = {
    "schema_version": 1,
    "name": "a",
    "model": {"source": "org/name"},
    "output": {"root": "/nowhere/a"},
    "data": {"tasks": [{"task": "reverse_word", "train_count": 10}]},
    "async": {"fully_async": True},
    "inference": {"num_engines": 2},
}


def spec_of(folder: Path, *overrides: str) -> RunSpec:
    path = folder / "run.json"
    path.write_text(json.dumps(BASE))
    return load_run(path, overrides).spec


def codes_of(folder: Path, *overrides: str) -> list[str]:
    report = capacity_report(spec_of(folder, *overrides))
    return [warning["code"] for warning in report["warnings"]]


@pytest.mark.parametrize(
    ("engines", "slots", "expected"),
    [
        (2, 64, 256),
        (32, 64, 4096),
        (32 // 4, 64, 1024),  # 32 devices, four an engine
        (3, 11, 72),  # 66 slots, rounded up to whole groups
        (1, 1, 64),  # never below one collection
    ],
)
def test_the_automatic_bound(engines: int, slots: int, expected: int) -> None:
    bound = automatic_concurrent_samples(
        engines=engines, slots=slots, samples_per_collection=64, samples_per_prompt=8
    )
    assert bound == expected


@pytest.mark.parametrize(
    ("overrides", "groups"),
    [
        ((), 32),
        (("inference.num_engines=3", "inference.server_concurrency=11"), 9),
        (("inference.num_engines=3", "inference.max_running_requests=11"), 9),
        (("async.async_max_concurrent_samples=8",), 1),
        (("async.async_max_concurrent_samples=23",), 2),  # a given value is rounded down
    ],
)
def test_groups_in_the_making(tmp_path: Path, overrides: tuple[str, ...], groups: int) -> None:
    assert concurrent_groups(spec_of(tmp_path, *overrides)) == groups


@pytest.mark.parametrize(("factor", "groups"), [(2.0, 16), (0.125, 1), (1.3, 10)])
def test_groups_that_wait(tmp_path: Path, factor: float, groups: int) -> None:
    spec = spec_of(tmp_path, f"async.async_data_buffer_capacity_factor={factor}")
    assert completed_groups_capacity(spec) == groups


def test_the_report_of_the_defaults(tmp_path: Path) -> None:
    report = capacity_report(spec_of(tmp_path))
    assert report.pop("warnings")[0]["code"] == "sample_granularity_retains_siblings"
    assert report == {
        "enabled": True,
        "scope": SCOPE,
        "engines": 2,
        "global_http_slots": 128,
        "requested_engine_slots": 128,
        "producer_sample_budget": 256,
        "producer_group_budget": 32,
        "submission_granularity": "sample",
        "completed_buffer_groups": 16,
        "completed_buffer_samples": 128,
        "samples_per_collection": 64,
        "samples_per_optimizer_step": 64,
    }


def test_only_group_granularity_bounds_everything_that_is_owned(tmp_path: Path) -> None:
    report = capacity_report(spec_of(tmp_path, 'async.rollout_submission_granularity="group"'))
    assert report["owned_plus_buffer_samples"] == 256 + 128
    assert report["warnings"] == []


def test_a_run_that_is_not_fully_async_has_no_capacity(tmp_path: Path) -> None:
    off = spec_of(tmp_path, "async.fully_async=false")
    assert capacity_report(off) == {"enabled": False, "warnings": []}


SAMPLE = "sample_granularity_retains_siblings"
GROUP = 'async.rollout_submission_granularity="group"'


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["async.async_max_concurrent_samples=135"], "budget_not_whole_groups"),
        (["async.async_max_concurrent_samples=136"], None),
        (["async.async_max_concurrent_samples=120"], "budget_below_serving_slots"),
        (["async.async_max_concurrent_samples=128"], None),
        (["inference.server_concurrency=63"], "http_below_running"),
        (["inference.max_running_requests=63"], None),
        (["async.async_data_buffer_capacity_factor=0.9"], "buffer_below_collection"),
        (["async.async_data_buffer_capacity_factor=1.0"], None),
        # (6 + 1) x 64 = 448 samples: 56 groups, factor 7
        (["async.async_data_buffer_capacity_factor=7.2"], "buffer_above_lag_window"),
        (["async.async_data_buffer_capacity_factor=7.0"], None),
        (["async.async_max_concurrent_samples=456"], "budget_above_lag_window"),
        (["async.async_max_concurrent_samples=448"], None),
        # 6 x 64 = 384 samples
        ([GROUP, "async.async_max_concurrent_samples=264"], "owned_above_lag"),
        ([GROUP, "async.async_max_concurrent_samples=256"], None),
    ],
)
def test_capacity_warnings(tmp_path: Path, overrides: list[str], code: str | None) -> None:
    always = [] if GROUP in overrides else [SAMPLE]
    assert sorted(codes_of(tmp_path, *overrides)) == sorted(always + ([code] if code else []))


def test_the_plan_says_what_is_asynchronous(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(BASE))
    overrides = ["core.max_policy_lag=5", "training.global_batch_size=32"]
    plan = build_plan(load_run(path, overrides))
    shape = plan["runtime"]["shape"]
    assert shape["fully_async"] is True
    assert shape["publication_mode"] == "barrier"
    assert shape["max_policy_lag_optimizer_steps"] == 5
    assert shape["max_group_age_optimizer_steps"] == 4  # K = 2
    assert shape["overlapped"] is False
    assert shape["tis"] is True
    assert plan["runtime"]["async"]["fully_async"] is True
    assert plan["runtime"]["async_capacity"]["samples_per_optimizer_step"] == 32
    assert plan["allocation"]["router_processes"] == 1
    assert plan["loop"]["fully_async"] is True


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["inference.deterministic=true"], "deterministic_async"),
        (['core.publication_mode="rolling"', "inference.num_engines=1"], "rolling_single_engine"),
        (['core.publication_mode="rolling"'], None),
        (['core.publication_mode="refresh"'], None),
        (["inference.server_concurrency=1"], None),  # said by the capacity report
    ],
)
def test_plan_warnings(tmp_path: Path, overrides: list[str], code: str | None) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(BASE))
    plan = build_plan(load_run(path, [*overrides, "training.save_interval=20"]))
    assert [warning["code"] for warning in plan["warnings"]] == ([code] if code else [])
