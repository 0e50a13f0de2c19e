import io

import pytest
from rich.console import Console

from models.checkpoint import CheckpointRef
from models.evaluation import EvaluationReport
from models.run import LoopPlan, RunProgress, RunState
from workers.cli.display import LiveReporter, PlainReporter, duration, eta_s, panel, update_line

PLAN = LoopPlan(num_rollouts=10)
EVALUATION = EvaluationReport(
    update=2,
    policy_version=2,
    name="reverse_word",
    prompts=64,
    samples=64,
    reward_mean=0.25,
    truncated_fraction=0.0,
    error_fraction=0.0,
    mean_response_tokens=5.0,
    uri="rollouts/eval.parquet",
    seconds=1.0,
)


def progress(done: int, **fields: object) -> RunProgress:
    rewards = tuple(index / 10 for index in range(done))
    return RunProgress.model_validate(
        {
            "state": RunState.TRAINING,
            "stage": f"optimize {done}",
            "plan": PLAN,
            "next_update": done,
            "reward_recent": rewards,
            "reward_first": rewards[0] if rewards else None,
            "lag": 1,
            "tokens_per_second": 1234.0,
            "seconds_per_update": 2.0,
            **fields,
        }
    )


def lines_of(reports: list[tuple[RunProgress | None, str]]) -> list[str]:
    stream = io.StringIO()
    with PlainReporter(Console(file=stream, width=80)) as reporter:
        for report, note in reports:
            reporter.show(report, note)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (75, "1:15"), (4000, "1:06:40"), (-3, "0:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_output_has_a_line_for_each_update_even_when_polls_miss_some() -> None:
    assert lines_of(
        [(progress(0), ""), (progress(2), ""), (progress(2), ""), (progress(3), "")]
    ) == [
        "update 1/10 reward 0.000",
        "update 2/10 reward 0.100 lag 1 1,234 tokens/s 2.00 s/update",
        "update 3/10 reward 0.200 lag 1 1,234 tokens/s 2.00 s/update",
    ]


def test_plain_output_joins_a_run_in_the_middle_and_says_what_is_amiss_once() -> None:
    assert lines_of([(progress(7), "no answer"), (None, "no answer"), (progress(8), "")]) == [
        "no answer",
        "update 8/10 reward 0.700 lag 1 1,234 tokens/s 2.00 s/update",
    ]


def test_plain_output_names_long_stages() -> None:
    preparing = RunProgress(stage="prepare")
    assert lines_of([(preparing, ""), (preparing, ""), (progress(1, stage="evaluate 1"), "")]) == [
        "preparing: prepare",
        "update 1/10 reward 0.000 lag 1 1,234 tokens/s 2.00 s/update",
        "training: evaluate 1",
    ]


def test_a_rewound_run_prints_no_update_twice() -> None:
    assert len(lines_of([(progress(4), ""), (progress(5), ""), (progress(3), "")])) == 1


def test_rewards_that_are_not_remembered_are_unknown() -> None:
    assert update_line(progress(5, reward_recent=(0.5,)), 0) == "update 1/10 reward ?"


def test_the_time_to_go_needs_a_speed() -> None:
    assert eta_s(progress(4)) == 12.0
    assert eta_s(progress(4, seconds_per_update=0.0)) is None
    assert eta_s(RunProgress()) is None


def test_the_panel_shows_everything_that_is_asked_for() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=120)
    report = progress(
        5,
        evaluation=EVALUATION,
        checkpoint=CheckpointRef(
            update=3, policy_version=4, folder="checkpoints/core/x", marker_sha256="0"
        ),
        recoveries=2,
        updates_redone=1,
    )
    console.print(panel("train/a", report, "odd", 61.0, "http://ui"))
    text = stream.getvalue()
    for expected in (
        "train/a  training  optimize 5  1:01 elapsed, about 0:10 to go",
        "update 5 of 10",
        "reward",
        "0.400",
        "from 0.000",
        "2.00 s/update",
        "1,234 tokens/s, lag 1",
        "0.250",
        "64 held-out prompts after update 2",
        "update 4",
        "1 updates redone",
        "http://ui/namespaces/default/workflows/train%2Fa",
        "odd",
    ):
        assert expected in text, expected


def test_a_paused_run_says_so() -> None:
    stream = io.StringIO()
    Console(file=stream, width=120).print(panel("train/a", progress(1, paused=True), "", 0.0, None))
    assert "paused" in stream.getvalue()


def test_the_live_display_survives_a_run_nobody_knows_about() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with LiveReporter(console, "train/a", None) as reporter:
        reporter.show(None, "no control worker has answered for 7 s")
        reporter.show(progress(1))


def test_an_error_is_shown_while_the_run_cleans_up() -> None:
    failing = progress(1, state="failed", stage="revoke", error="gone", error_type="TrainerLost")
    assert lines_of([(failing, ""), (failing, "")])[-1] == "failed: revoke"
    assert "failed (revoke): TrainerLost: gone" in panel_text(failing)


def test_an_error_is_not_shown_twice_at_the_end() -> None:
    # The command prints it below the display.
    failed = progress(1, state="failed", stage="failed", error="gone", error_type="TrainerLost")
    assert "gone" not in panel_text(failed)
    assert "gone" not in "".join(lines_of([(failed, "")]))


def panel_text(report: RunProgress) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(panel("train/a", report, "", 0.0, None))
    return stream.getvalue()


def test_a_note_that_only_counts_on_is_said_once() -> None:
    waiting = RunProgress(stage="claim")
    notes = ["silent for 9 s", "silent for 14 s", "", "silent for 7 s"]
    assert lines_of([(waiting, note) for note in notes]) == [
        "silent for 9 s",
        "preparing: claim",
        "silent for 7 s",
    ]


def test_a_resumed_run_does_not_repeat_what_an_earlier_attempt_did() -> None:
    fresh = RunProgress(stage="claim")
    resumed = progress(3, state="preparing", stage="prepare", reward_recent=())
    going_on = progress(4, reward_recent=(0.5,))
    assert lines_of([(fresh, ""), (resumed, ""), (going_on, "")]) == [
        "preparing: claim",
        "preparing: prepare",
        "update 4/10 reward 0.500 lag 1 1,234 tokens/s 2.00 s/update",
    ]
