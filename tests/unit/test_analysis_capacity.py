"""Rates of every update: sums that can be done by hand; what is unknown is absent."""

import json
from pathlib import Path

import pytest
from measured_run import MeasuredRun, step_event

from activities.analysis.capacity import measurements
from activities.storage import layout
from models.errors import ConfigurationError
from workers.cli.app import run_command

URLS = ("http://127.0.0.1:30000", "http://127.0.0.1:30001")


@pytest.fixture
def run(tmp_path: Path) -> MeasuredRun:
    """Two GPUs train, four serve in two engines, eight are allocated."""
    run = MeasuredRun(tmp_path / "root", trainer_ranks=2)
    run.plan["allocation"] |= {
        "placement": "disaggregated",
        "engine_processes": 2,
        "gpus": {
            "allocated_gpus": 8,
            "nodes": [{"trainer_gpus": 2, "rollout_gpus": 4, "ray_gpus": 6}],
        },
    }
    return run


def test_rates_of_an_update(run: MeasuredRun) -> None:
    """Cycle 3 s, 100 response tokens, 200 model tokens; the slower rank takes 0.8 s."""
    run.contract[1][3] = step_event(4, 3, 1, seconds=0.8)
    for rank, seconds, tokens in ((0, 0.1, 50), (1, 0.2, 70)):
        event = {"event": "score_timing", "rollout_id": 3, "seconds": seconds}
        run.contract[rank].append({**event, "model_tokens": tokens})
    report = measurements(run.write(), warmup=2)
    assert [row["update"] for row in report["rows"]] == [1, 2, 3, 4]
    assert [row["is_warm"] for row in report["rows"]] == [False, False, True, True]
    row = report["rows"][3]
    expected = {
        "pipeline/cycle_seconds": 3,
        "pipeline/collection_seconds": 1,
        "pipeline/publication_seconds": 1,
        "pipeline/trainer_occupied_fraction": 2 / 3,
        "pipeline/useful_response_tokens_per_second": 100 / 3,
        "pipeline/useful_response_tokens_per_allocated_gpu_second": 100 / 24,
        "trainer/score_train_seconds": 1,
        "trainer/useful_response_tokens_per_gpu_cycle_second": 100 / 6,
        "inference/useful_response_tokens_per_gpu_cycle_second": 100 / 12,
        "trainer/step_seconds": 0.8,
        "trainer/model_tokens_per_second": 250,
        "trainer/model_tokens_per_gpu_second": 125,
        "trainer/active_response_tokens_per_second": 125,
        "trainer/active_response_tokens_per_gpu_second": 62.5,
        "trainer/scoring_seconds": 0.2,
        "trainer/scoring_model_tokens_per_second": 600,
        "trainer/scoring_model_tokens_per_gpu_second": 300,
        "quality/mixed_responses": 1,
        "quality/completed_queue/delivered_response_tokens": 100,
        "quality/completed_queue/dropped_response_tokens": 0,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert not [name for name in row if "scoring" in name and name not in expected]
    assert not [name for name in report["rows"][2] if "scoring" in name]
    assert "quality/current_policy_token_fraction" not in row


def engine_look(run: MeasuredRun, url: str, time: float, tokens: float | None) -> None:
    found = [
        {"name": "gen_throughput", "labels": {}, "value": tokens},
        {"name": "token_usage", "labels": {"tp_rank": "0"}, "value": 0.5},
        {"name": "token_usage", "labels": {"tp_rank": "1"}, "value": 0.5},
    ]
    row = {"time_unix": time, "engine": url, "series": found}
    run.append(layout.engine_occupancy(url), [row])


def test_means_over_engines_need_all_of_them(run: MeasuredRun) -> None:
    """Update 2 lies in seconds 3 to 6, update 3 in 6 to 9; engine 1 is not seen from 7 on."""
    root = run.write()
    for time in (3.0, 4.5, 6.0):
        engine_look(run, URLS[0], time, 400.0 if time < 4 else 200.0)
    engine_look(run, URLS[1], 3.0, 100.0)
    engine_look(run, URLS[1], 7.0, None)
    fleet = [
        {"role": "engine", "rank": rank, "host": "a", "url": url}
        for rank, url in enumerate(reversed(URLS))
    ]
    run.store.write_json(layout.FLEET_JSON, fleet)
    rows = measurements(root, warmup=0)["rows"]
    second, third = rows[1], rows[2]
    assert second["inference/engine_1/gen_throughput"] == 300
    assert second["inference/engine_1/gen_throughput_peak"] == 400
    assert second["inference/engine_1/gen_throughput_coverage"] == 1
    assert second["inference/engine_0/gen_throughput"] == 100
    assert second["inference/gen_throughput"] == 200
    assert second["inference/observed_decode_tokens_per_gpu_second"] == 100
    assert not [name for name in second if "token_usage" in name]
    assert third["inference/engine_0/gen_throughput_coverage"] == pytest.approx(1 / 3)
    assert third["inference/engine_0/gen_throughput"] == 100
    assert "inference/gen_throughput" not in third
    assert "inference/observed_decode_tokens_per_gpu_second" not in third
    assert "inference/engine_0/gen_throughput" not in rows[0]


def test_an_engine_of_an_earlier_life_takes_the_free_rank(run: MeasuredRun) -> None:
    root = run.write()
    engine_look(run, "http://127.0.0.1:29999", 3.0, 50.0)
    engine_look(run, URLS[0], 3.0, 70.0)
    fleet = [{"role": "engine", "rank": 0, "host": "a", "url": URLS[0]}]
    run.store.write_json(layout.FLEET_JSON, fleet)
    row = measurements(root, warmup=0)["rows"][1]
    assert row["inference/engine_0/gen_throughput"] == 70
    assert row["inference/engine_1/gen_throughput"] == 50
    assert row["inference/gen_throughput"] == 60


def gpu_look(run: MeasuredRun, time: float, percents: list[float | None]) -> None:
    devices = [
        {
            "index": index,
            "uuid": f"GPU-{index}",
            "utilization.gpu": percent,
            "utilization.memory": 1,
            "memory.used": 512,
            "memory.total": 2048,
        }
        for index, percent in enumerate(percents)
    ]
    row = {"time_unix": time, "host": "a", "devices": devices}
    run.append("checkpoints/gpu_usage_node0.jsonl", [row])


def test_gpus_are_those_of_trainer_then_engines_then_nobody(run: MeasuredRun) -> None:
    root = run.write()
    gpu_look(run, 3.0, [90, 70, 10, 20, 30, None, 0, 0])
    gpu_look(run, 6.0, [90, 70, 10, 20, 30, 40, 0, 0])
    rows = measurements(root, warmup=0)["rows"]
    second, third = rows[1], rows[2]
    assert second["trainer/gpu_usage_node0_gpu_1/kernel_activity_percent"] == 70
    assert second["trainer/kernel_activity_percent"] == 80
    assert second["trainer/memory_used_gib"] == 0.5
    assert second["trainer/memory_total_gib"] == 2
    assert second["unused/kernel_activity_percent"] == 0
    assert "inference/kernel_activity_percent" not in second
    assert second["inference/gpu_usage_node0_gpu_5/kernel_activity_percent_coverage"] == 0
    assert "inference/gpu_usage_node0_gpu_5/kernel_activity_percent" not in second
    assert third["inference/kernel_activity_percent"] == 25


def test_a_mean_needs_every_gpu_of_the_plan(run: MeasuredRun) -> None:
    root = run.write()
    gpu_look(run, 3.0, [90])
    row = measurements(root, warmup=0)["rows"][1]
    assert row["trainer/gpu_usage_node0_gpu_0/kernel_activity_percent"] == 90
    assert "trainer/kernel_activity_percent" not in row


def test_a_run_without_gpus_has_no_rates_of_gpus(tmp_path: Path) -> None:
    rows = measurements(MeasuredRun(tmp_path).write(), warmup=0)["rows"]
    assert not [name for row in rows for name in row if "gpu" in name]


def test_a_pipeline_that_was_not_observed_says_so(run: MeasuredRun) -> None:
    row = measurements(run.write(), warmup=0)["rows"][0]
    assert row["pipeline/http_active_requests_coverage"] == 0
    assert "pipeline/http_active_requests" not in row


def test_colocated_runs_are_refused(run: MeasuredRun) -> None:
    run.plan["allocation"]["placement"] = "colocated"
    with pytest.raises(ConfigurationError, match="take turns"):
        measurements(run.write(), warmup=0)


def test_command_writes_the_report(run: MeasuredRun, capsys) -> None:
    root = run.write()
    assert run_command(["analyze", "capacity", root, "--warmup", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads((Path(root) / "capacity-analysis.json").read_text()) == printed
    assert run_command(["analyze", "capacity", root, "--warmup", "1"]) == 0
    assert "trainer/score_train_seconds" in capsys.readouterr().out
