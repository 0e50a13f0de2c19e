"""Means over time: a gap is missing coverage, never zero."""

import json
from pathlib import Path
from random import Random

import pytest
from measured_run import MeasuredRun

from activities.analysis.held import Series, as_value, summarize
from activities.analysis.occupancy import analyze
from activities.storage import layout
from models.errors import ConfigurationError, ContractViolation
from workers.cli.app import run_command

URL = "http://127.0.0.1:30000"


@pytest.fixture
def run(tmp_path: Path) -> MeasuredRun:
    return MeasuredRun(tmp_path / "root")


def test_a_value_holds_until_the_next_look_and_no_longer_than_told() -> None:
    points = [(0, 2), (2, 0), (4, None), (20, 10)]
    summary = summarize(points, 1, 25, max_hold=5)
    assert summary == {
        "coverage": pytest.approx(8 / 24),
        "mean": pytest.approx(6.5),
        "p95": 10,
        "maximum": 10,
        "empty_fraction": pytest.approx(0.25),
    }


def test_the_order_of_points_does_not_matter() -> None:
    points = [(20, 10), (4, None), (0, 2), (2, 0)]
    assert summarize(points, 1, 25, max_hold=5)["mean"] == pytest.approx(6.5)


@pytest.mark.parametrize("points", [[], [(3, None)], [(3, float("nan"))], [(30, 1)], [(-20, 1)]])
def test_nothing_known_is_no_zero(points: list) -> None:
    assert summarize(points, 0, 10) == {
        "coverage": 0,
        "mean": None,
        "p95": None,
        "maximum": None,
        "empty_fraction": None,
    }


@pytest.mark.parametrize(("start", "end", "hold"), [(2, 2, 1), (3, 2, 1), (0, 1, 0), (0, 1, -1)])
def test_an_empty_window_is_refused(start: float, end: float, hold: float) -> None:
    with pytest.raises(ConfigurationError, match="covers nothing"):
        summarize([(0, 1)], start, end, max_hold=hold)


def test_p95_is_a_value_that_was_held_for_95_percent() -> None:
    """19 s at 1 and 1 s at 9: 95 % of the time at 1."""
    points = [(float(second), 9 if second == 7 else 1) for second in range(20)]
    summary = summarize(points, 0, 20)
    assert (summary["p95"], summary["maximum"]) == (1, 9)


def test_summaries_match_a_look_at_every_tenth_of_a_second() -> None:
    """Against brute force on times that are multiples of a tenth of a second."""
    random = Random(7)
    for _ in range(20):
        times = random.sample(range(400), 30)
        points = {t: random.choice([None, 0, 1, 2, 5]) for t in times}
        start, end = sorted(random.sample(range(400), 2))
        known = []
        for tick in range(start, end):
            last = max((t for t in points if t <= tick), default=None)
            if last is not None and tick - last < 50 and points[last] is not None:
                known.append(points[last])
        series = Series([t / 10 for t in points], map(as_value, points.values()))
        summary = series.summary(start / 10, end / 10, 5.0)
        assert summary.coverage == pytest.approx(len(known) / (end - start))
        if known:
            assert summary.mean == pytest.approx(sum(known) / len(known))
            assert summary.maximum == max(known)
            assert summary.empty_fraction == pytest.approx(known.count(0) / len(known))


def look(time: float, **values) -> dict:
    return {"time_unix": time, **values}


def test_a_series_is_unknown_in_looks_that_do_not_show_it(run: MeasuredRun) -> None:
    """Warm window: seconds 3 to 12. ``b`` is seen at 6 alone, and the rows are out of order."""
    root = run.write()
    a, b = ({"name": name, "labels": {}, "value": 2.0} for name in "ab")
    rows = [(9.0, [a]), (3.0, [a]), (6.0, [a, b])]
    run.append(
        layout.engine_occupancy(URL), [look(at, engine=URL, series=series) for at, series in rows]
    )
    found = analyze(root, warmup=1)["engines"][URL]["series"]
    assert {each["name"]: each["coverage"] for each in found} == {
        "a": 1.0,
        "b": pytest.approx(1 / 3),
    }
    assert {each["mean"] for each in found} == {2.0}


def test_pipeline_series_with_the_derived_two(run: MeasuredRun) -> None:
    """Warm window of updates 1 to 3: seconds 3 to 12. The producer is restarted at second 9."""
    root = run.write()
    run.append(
        layout.PIPELINE_OCCUPANCY,
        [
            look(
                3.0,
                completed_queue_groups=16,
                completed_queue_capacity_groups=16,
                completed_put_current_wait_seconds=0.5,
                completed_queue={"groups": 16, "samples": 128, "response_tokens": 700},
                producer_admission_open=True,
                http_waiting_requests=None,
            ),
            look(
                6.0,
                completed_queue_groups=8,
                completed_queue_capacity_groups=16,
                completed_put_current_wait_seconds=0.0,
                completed_queue=None,
                producer_admission_open=False,
            ),
            look(9.0),
        ],
    )
    report = analyze(root, warmup=1)
    assert (report["start_unix"], report["end_unix"]) == (3.0, 12.0)
    assert report["max_sample_hold_seconds"] == 10
    pipeline = report["pipeline"]
    assert len(pipeline) == 17
    assert pipeline["completed_queue_groups"]["mean"] == 12
    assert pipeline["completed_queue_groups"]["coverage"] == pytest.approx(6 / 9)
    assert pipeline["completed_queue_full"]["mean"] == 0.5
    assert pipeline["completed_put_blocked"]["mean"] == 0.5
    assert pipeline["completed_queue_response_tokens"]["coverage"] == pytest.approx(3 / 9)
    assert pipeline["producer_admission_open"]["empty_fraction"] == 0.5
    assert pipeline["http_waiting_requests"]["mean"] is None


def series(name: str, value: float | None, **labels: str) -> dict:
    return {"name": name, "labels": labels, "value": value}


def test_engines_by_label_with_failed_looks(run: MeasuredRun) -> None:
    root = run.write()
    run.append(
        layout.engine_occupancy(URL),
        [
            look(3.0, engine=URL, series=[series("num_running_reqs", 4, tp_rank="0")]),
            look(5.0, engine=URL, error="ServiceUnreachable: no answer"),
            look(
                7.0,
                engine=URL,
                series=[
                    series("num_running_reqs", 8, tp_rank="0"),
                    series("num_running_reqs", 2, tp_rank="1"),
                ],
            ),
            # twice the same labels: nobody knows which one holds
            look(
                9.0,
                engine=URL,
                series=[
                    series("num_running_reqs", 1, tp_rank="1"),
                    series("num_running_reqs", 3, tp_rank="1"),
                ],
            ),
        ],
    )
    run.append(layout.ENGINE_OCCUPANCY, [look(4.0, discovery_error="no router is known yet")])
    engine = analyze(root, warmup=1)["engines"][URL]
    assert engine["failed_observations"] == 1
    first, second = engine["series"]
    assert first["labels"] == {"tp_rank": "0"}
    assert first["coverage"] == pytest.approx(4 / 9)
    assert first["mean"] == pytest.approx((4 * 2 + 8 * 2) / 4)
    assert second["labels"] == {"tp_rank": "1"}
    assert (second["coverage"], second["mean"]) == (pytest.approx(2 / 9), 2)


def gpu(index: int, percent: float | None, used: float = 1024) -> dict:
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "utilization.gpu": percent,
        "utilization.memory": 0,
        "memory.used": used,
        "memory.total": 2048,
    }


def test_hardware_and_who_uses_it(run: MeasuredRun) -> None:
    root = run.write()
    rows = [
        look(3.0, host="a", devices=[gpu(0, 50), gpu(1, 0)]),
        look(6.0, host="a", error="driver hangs"),
        look(9.0, host="a", devices=[gpu(0, 100), gpu(1, None)]),
    ]
    run.append("checkpoints/gpu_usage_node0.jsonl", rows)
    processes = [
        {"role": "trainer", "rank": 0, "host": "a", "gpus": ["1"]},
        {"role": "engine", "rank": 0, "host": "a", "gpus": ["GPU-0"], "url": URL},
    ]
    run.store.write_json(layout.FLEET_JSON, processes)
    report = analyze(root, warmup=1)
    first, second = report["hardware"]["gpu_usage_node0"]
    assert (first["index"], first["uuid"]) == (0, "GPU-0")
    assert first["metrics"]["utilization.gpu"]["mean"] == 75
    assert first["metrics"]["utilization.gpu"]["coverage"] == pytest.approx(6 / 9)
    assert second["metrics"]["utilization.gpu"]["coverage"] == pytest.approx(3 / 9)
    assert second["metrics"]["utilization.gpu"]["empty_fraction"] == 1
    assert second["metrics"]["memory.used"]["mean"] == 1024
    assert report["node_roles"] == {
        "gpu_usage_node0": {"host": "a", "trainer": [1], "inference": [0]}
    }


def test_a_window_of_choice(run: MeasuredRun) -> None:
    root = run.write()
    run.append(layout.PIPELINE_OCCUPANCY, [look(0.0, producer_owned_groups=3)])
    report = analyze(root, warmup=1, window=(0.0, 20.0))
    assert report["pipeline"]["producer_owned_groups"]["coverage"] == 0.5


def test_a_failed_stage_is_refused(run: MeasuredRun) -> None:
    run.add_stage("publication", 3, 20.0, 1.0, passed=False)
    with pytest.raises(ContractViolation, match="publication of update 3 failed"):
        analyze(run.write(), warmup=1)


def test_command_writes_the_report(run: MeasuredRun, capsys) -> None:
    root = run.write()
    run.append(layout.PIPELINE_OCCUPANCY, [look(3.0, producer_owned_groups=3)])
    assert run_command(["analyze", "occupancy", root, "--warmup", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads((Path(root) / "occupancy-analysis.json").read_text()) == printed
    assert run_command(["analyze", "occupancy", root, "--warmup", "1"]) == 0
    table = capsys.readouterr().out
    assert "producer_owned_groups" in table
    unseen = [name for name, each in printed["pipeline"].items() if not each["coverage"]]
    assert unseen
    assert not any(name in table for name in unseen)
    assert f"{len(unseen)} series were never seen" in table
