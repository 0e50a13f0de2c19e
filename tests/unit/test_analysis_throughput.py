"""What a finished run cost: sums that can be done by hand, and every reason to refuse one."""

import json
from pathlib import Path

import pytest
from measured_run import FLOW, MeasuredRun, flow_row, step_event

from activities.analysis.throughput import analyze
from models.errors import ConfigurationError, ContractViolation
from workers.cli.app import run_command


@pytest.fixture
def run(tmp_path: Path) -> MeasuredRun:
    return MeasuredRun(tmp_path / "root")


def test_a_run_of_four_updates_of_one_second_a_stage(run: MeasuredRun) -> None:
    run.add_stage("checkpoint", 3, 12.0, 100.0)
    report = analyze(run.write(), warmup=1)
    assert report["warm_cycle_seconds"] == 9
    assert report["useful_response_tokens"] == 300
    assert report["useful_response_tokens_per_second"] == pytest.approx(33.33, abs=0.01)
    assert report["trainer_wait_fraction"] == pytest.approx(1 / 3)
    assert report["batch_collection_breakdown"] == {
        "completed_queue_get_seconds": 0.75,
        "completed_queue_get_cycle_fraction": pytest.approx(0.75 / 9),
        "other_collection_seconds": 2.25,
        "other_collection_cycle_fraction": pytest.approx(0.25),
    }
    assert len(report["per_update"]) == 3
    assert report["all_driver_stage_seconds"] == {
        "checkpoint": 100,
        "generation_wait": 4,
        "publication": 4,
        "training": 4,
    }
    assert report["median_seconds"] == {"generation_wait": 1, "training": 1, "publication": 1}
    counts = ("completed_updates", "measured_updates", "warmup_updates", "validated_trainer_ranks")
    assert [report[name] for name in counts] == [4, 3, 1, 1]
    assert report["end_to_end_passed"]
    assert report["mixed_responses"] == 3


def test_discarded_tokens_are_a_share_of_all_that_left_the_queue(run: MeasuredRun) -> None:
    run.flow[2] = flow_row(2, dropped=100)
    report = analyze(run.write(), warmup=1)
    assert report["discarded_response_tokens"] == 100
    assert report["discarded_token_fraction"] == pytest.approx(100 / 400)


def test_an_update_without_a_step_published_nothing(run: MeasuredRun) -> None:
    """Every group of the second of four updates tied: its version is the one before it."""
    run.timings = [
        row for row in run.timings if (row["stage"], row["rollout_id"]) != ("publication", 1)
    ]
    for line in run.lines[1:]:
        line["policy_version"] -= 1
    run.contract[0] = [step_event(1, 0, 0), step_event(2, 2, 0), step_event(3, 3, 0)]
    report = analyze(run.write(), warmup=1)
    assert report["warm_cycle_seconds"] == 8
    assert [row["publication_seconds"] for row in report["per_update"]] == [0, 1, 1]


def test_components_are_those_of_the_first_rank(tmp_path: Path) -> None:
    run = MeasuredRun(tmp_path, trainer_ranks=2)
    run.contract[0][3] = step_event(4, 3, 0, seconds=2.0)
    scoring = {"event": "score_timing", "rollout_id": 3, "seconds": 0.2, "model_tokens": 10}
    run.contract[0].append(scoring)
    run.contract[1].append({**scoring, "seconds": 9.0})
    report = analyze(run.write(), warmup=1)
    assert report["training_components_rank0"] == {
        "standalone_scoring": {"count": 1, "total_seconds": 0.2, "median_seconds": 0.2},
        "forward_backward_optimizer": {"count": 3, "total_seconds": 3.0, "median_seconds": 0.5},
    }
    assert report["validated_trainer_ranks"] == 2


def test_share_of_the_current_policy_is_weighted_by_tokens_over_ranks(tmp_path: Path) -> None:
    run = MeasuredRun(tmp_path, trainer_ranks=2)
    for rank, tokens, fraction in ((0, 30, 1.0), (1, 10, 0.0)):
        run.contract[rank].append(
            {
                "event": "refresh_scores",
                "rollout_id": 2,
                "active_tokens": tokens,
                "current_version_token_fraction": fraction,
            }
        )
    report = analyze(run.write(), warmup=1)
    assert report["current_policy_token_fraction"] == 0.75
    assert report["provenance_active_tokens"] == 40


def held(groups: int) -> dict[str, int]:
    return {"groups": groups, "samples": 4 * groups, "response_tokens": 50 * groups}


def test_unused_work_counts_against_all_updates(run: MeasuredRun) -> None:
    run.flow[0] = flow_row(0, dropped=50)
    run.lifecycle = [
        {"event": "shutdown_start"},
        {
            "event": "shutdown_complete",
            "completed_queue": held(1),
            "producer_ready": held(0),
            "shutdown_unqueued": held(2),
        },
    ]
    report = analyze(run.write(), warmup=1)
    assert report["terminal_unused_work"]["response_tokens"] == {
        "remaining": 150,
        "delivered": 400,
        "stale": 50,
        "remaining_fraction": pytest.approx(150 / 600),
    }
    assert report["terminal_unused_work"]["groups"]["remaining"] == 3


@pytest.mark.parametrize(
    "last",
    [
        {"event": "shutdown_incomplete", "completed_queue": held(1)},
        {"event": "shutdown_complete", "completed_queue": held(1), "producer_ready": None},
    ],
)
def test_unused_work_is_unknown_unless_the_end_says_all(run: MeasuredRun, last: dict) -> None:
    run.lifecycle = [last]
    assert analyze(run.write(), warmup=1)["terminal_unused_work"] is None


def test_a_missing_wait_leaves_the_breakdown_unknown(run: MeasuredRun) -> None:
    del run.flow[3]["queue_metrics"][f"{FLOW}/consumer_wait_seconds"]
    assert analyze(run.write(), warmup=1)["batch_collection_breakdown"] is None


def test_a_run_that_its_soft_deadline_stopped_is_measured_and_says_so(run: MeasuredRun) -> None:
    run.plan["runtime"]["shape"]["updates"] = 100
    run.workflow["result"]["stopped_for_time"] = True
    report = analyze(run.write(), warmup=1)
    assert report["stopped_for_time"]
    assert report["end_to_end_passed"]
    assert (report["completed_updates"], report["planned_updates"]) == (4, 100)


def test_an_overlapped_wait_is_what_training_did_not_hide(run: MeasuredRun) -> None:
    """Collection 1 takes 5 s, of which 2 s lie beside training and publication of update 0."""
    run.plan["runtime"]["shape"]["overlapped"] = True
    run.timings = []
    for update in range(4):
        start = 10.0 * update
        run.add_stage("training", update, start + 5, 2.0)
        run.add_stage("publication", update, start + 7, 1.0)
        run.add_stage("generation_wait", update, start - (1 if update else 0), 5.0)
    run.timings[5]["started_unix"] = 6.0  # of update 1; training and publication end at 8
    report = analyze(run.write(), warmup=1)
    waits = [row["generation_wait_seconds"] for row in report["per_update"]]
    assert waits == [3.0, 5.0, 5.0]


def test_updates_of_several_steps_and_of_none(run: MeasuredRun) -> None:
    """Update 1 takes two steps, update 2 none (all of its groups tied), update 3 one."""
    for line, version in zip(run.lines, (1, 3, 3, 4), strict=True):
        line["policy_version"] = version
    places = ((1, 0), (2, 1), (3, 1), (4, 3))
    run.contract[0] = [step_event(step, update, 0) for step, update in places]
    report = analyze(run.write(), warmup=1)
    assert [row["optimizer_steps"] for row in report["per_update"]] == [2, 0, 1]
    assert [row["step_seconds"] for row in report["per_update"]] == [1.0, 0.0, 0.5]


def repeat_update(run: MeasuredRun) -> None:
    run.add_stage("training", 2, 30.0, 1.0)


def fail_stage(run: MeasuredRun) -> None:
    run.add_stage("evaluation", 2, 30.0, 1.0, passed=False)


def lose_stage(run: MeasuredRun) -> None:
    run.timings = [row for row in run.timings if (row["stage"], row["rollout_id"]) != STAGE_LOST]


STAGE_LOST = ("publication", 3)


def lose_rank(run: MeasuredRun) -> None:
    run.contract[0] = []


def lose_step(run: MeasuredRun) -> None:
    del run.contract[0][2]


def repeat_step(run: MeasuredRun) -> None:
    run.contract[0].append(step_event(3, 2, 0))


def skip_step(run: MeasuredRun) -> None:
    run.contract[0][2]["optimizer_skipped"] = True


def lose_flow(run: MeasuredRun) -> None:
    del run.flow[0]


def lose_counter(run: MeasuredRun) -> None:
    del run.flow[3]["queue_metrics"][f"{FLOW}/dropped_response_tokens"]


def contradict_tokens(run: MeasuredRun) -> None:
    run.flow[3]["response_tokens"] = 99


def wait_too_long(run: MeasuredRun) -> None:
    run.flow[3]["queue_metrics"][f"{FLOW}/consumer_wait_seconds"] = 1.002


def wait_backwards(run: MeasuredRun) -> None:
    run.timings[-1]["seconds"] = -1.0


def take_no_time(run: MeasuredRun) -> None:
    for row in run.timings:
        row["seconds"] = 0.0
    for row in run.flow:
        row["queue_metrics"][f"{FLOW}/consumer_wait_seconds"] = 0.0


def end_early(run: MeasuredRun) -> None:
    run.plan["runtime"]["shape"]["updates"] = 5


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (repeat_update, "training of update 2 was done more than once"),
        (fail_stage, "evaluation of update 2 failed"),
        (lose_stage, "publication of update 3 has no row"),
        (lose_rank, "training_contract_rank0.jsonl is missing"),
        (lose_step, "optimizer step 3 of update 2 is missing"),
        (repeat_step, "optimizer step 3 was done more than once"),
        (skip_step, "optimizer step 3 was not taken"),
        (lose_flow, "no row of rollout_id 0"),
        (lose_counter, "lacks the counter"),
        (contradict_tokens, "delivered 100 response tokens, but its samples have 99"),
        (wait_too_long, "waited 1.002 s in the queue"),
        (wait_backwards, "finite and not negative"),
        (take_no_time, "took no time"),
        (end_early, "4 of 5 planned updates"),
    ],
)
def test_what_contradicts_itself_is_refused(run: MeasuredRun, spoil, message: str) -> None:
    spoil(run)
    with pytest.raises(ContractViolation, match=message):
        analyze(run.write(), warmup=1)


@pytest.mark.parametrize("slack", [0.0, 0.0009])
def test_two_clocks_may_differ_by_a_millisecond(run: MeasuredRun, slack: float) -> None:
    run.flow[3]["queue_metrics"][f"{FLOW}/consumer_wait_seconds"] = 1.0 + slack
    assert analyze(run.write(), warmup=1)["measured_updates"] == 3


@pytest.mark.parametrize(("warmup", "message"), [(-1, "warmup is -1"), (4, "leaves none")])
def test_warmup_must_leave_updates(run: MeasuredRun, warmup: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        analyze(run.write(), warmup=warmup)


def test_incomplete_runs_are_refused_unless_they_are_wanted(run: MeasuredRun) -> None:
    run.workflow["status"] = "stopped"
    run.plan["runtime"]["shape"]["updates"] = 9
    repeat_update(run)
    fail_stage(run)
    run.timings[-2]["seconds"] = 4.0  # the last try of update 2
    root = run.write()
    with pytest.raises(ConfigurationError, match=r"is stopped, not complete.*--allow-incomplete"):
        analyze(root, warmup=1)
    report = analyze(root, warmup=1, allow_incomplete=True)
    assert not report["end_to_end_passed"]
    assert report["failed_stages"] == 1
    assert report["warm_cycle_seconds"] == 9 + 3


def test_no_run_no_analysis(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no run"):
        analyze(str(tmp_path))


def test_command_writes_the_report(run: MeasuredRun, capsys) -> None:
    root = run.write()
    assert run_command(["analyze", "throughput", root, "--warmup", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads((Path(root) / "throughput-analysis.json").read_text()) == printed
    assert printed["warm_cycle_seconds"] == 9
    assert run_command(["analyze", "throughput", root, "--warmup", "1"]) == 0
    shown = capsys.readouterr()
    assert "33.3" in shown.out
    assert "throughput-analysis.json" in shown.err


def test_command_says_what_to_do_about_an_incomplete_run(run: MeasuredRun, capsys) -> None:
    run.workflow["status"] = "failed"
    assert run_command(["analyze", "throughput", run.write()]) == 2
    assert "--allow-incomplete" in capsys.readouterr().err
