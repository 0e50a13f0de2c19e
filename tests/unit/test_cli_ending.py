import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from models.evaluation import ExportReport
from models.run import RunOutcome, RunProgress, RunState
from workers.cli.artifacts import History, read_history
from workers.cli.ending import Ending, read_ending, show_ending
from workers.cli.errors import DONE, FAILED, USAGE
from workers.cli.server import Failure, RunView

VIEW = RunView("train/a", "completed", 100.0, 160.0, {})
EXPORT = ExportReport(
    uri="export-hf",
    policy_version=3,
    num_bytes=1,
    num_parameters=1,
    max_abs_logit_difference=0.0,
    answer=" 12",
    question="What is 3 * 4?",
    seconds=1.0,
)


def metrics(folder: Path, rows: list[dict[str, object]]) -> str:
    (folder / "checkpoints").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "checkpoints" / "metrics.jsonl").write_text(text + '{"torn')
    return str(folder)


def ending_of(root: str, outcome: RunOutcome | Failure, status: str = "completed") -> Ending:
    view = RunView("train/a", status, 100.0, 160.0, {})
    return read_ending(view, RunProgress(started_unix=90.0), outcome, None, root)


def complete(state: RunState = RunState.COMPLETE) -> RunOutcome:
    return RunOutcome(run_id="train/a", state=state, updates=20, export_hf="export-hf")


def test_first_and_last_are_means_over_a_tenth_and_redone_updates_count_once(
    tmp_path: Path,
) -> None:
    rows: list[dict[str, object]] = [
        {"rollout/step": step, "rollout/reward": step / 20} for step in range(20)
    ]
    rows.insert(4, {"rollout/step": 3, "rollout/reward": 99.0})
    rows[3], rows[4] = rows[4], rows[3]
    rows += [
        {"eval/step": 0, "eval/reverse_word": 0.2, "eval/reverse_word-truncated_ratio": 1.0},
        {"eval/step": 20, "eval/reverse_word": 0.9},
        {"train/step": 5, "train/loss": 1.0},
    ]
    history = read_history(metrics(tmp_path, rows))
    assert len(history.rewards) == 20
    assert history.rewards[3] == 3 / 20
    assert history.reward_first == pytest.approx((0 + 1 / 20) / 2)
    assert history.reward_last == pytest.approx((18 / 20 + 19 / 20) / 2)
    assert history.evaluations == ((0, 0.2), (20, 0.9))


def test_a_short_run_has_a_first_and_a_last_update() -> None:
    assert History((0.1, 0.4)).reward_first == 0.1
    assert History((0.1, 0.4)).reward_last == 0.4
    assert History().reward_first is None


def test_a_root_that_is_not_there_has_no_history(tmp_path: Path) -> None:
    assert read_history(str(tmp_path / "nowhere")) == History()


@pytest.mark.parametrize(
    ("outcome", "status", "state", "code"),
    [
        (complete(), "completed", "complete", DONE),
        (complete(RunState.STOPPED), "completed", "stopped", FAILED),
        (Failure("TrainerLost", "gone"), "failed", "failed", FAILED),
        (Failure("ConfigurationError", "wrong key"), "failed", "failed", USAGE),
        (Failure("OwnershipError", "owned"), "failed", "failed", USAGE),
        (Failure("CancelledError", "canceled"), "canceled", "stopped", FAILED),
        (Failure("TerminatedError", "terminated"), "terminated", "stopped", FAILED),
    ],
)
def test_states_and_exit_codes(
    tmp_path: Path, outcome: RunOutcome | Failure, status: str, state: str, code: int
) -> None:
    ending = ending_of(str(tmp_path), outcome, status)
    assert (ending.state, ending.exit_code) == (state, code)


def test_the_json_line(tmp_path: Path) -> None:
    root = metrics(tmp_path, [{"rollout/step": 0, "rollout/reward": 0.5}])
    line = ending_of(root, complete()).as_json()
    assert line == {
        "run_id": "train/a",
        "state": "complete",
        "updates": 20,
        "reward_first": 0.5,
        "reward_last": 0.5,
        "seconds": 70.0,
        "root": root,
        "export_hf": "export-hf",
        "error": None,
    }


def test_the_last_screen(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"rollout/step": step, "rollout/reward": step / 10} for step in range(10)
    ]
    rows += [{"eval/step": 0, "eval/x": 0.1}, {"eval/step": 10, "eval/x": 0.8}]
    root = metrics(tmp_path, rows)
    ending = read_ending(VIEW, None, complete(), EXPORT, root)
    stream = io.StringIO()
    show_ending(Console(file=stream, width=100), ending, ["run.toml"], "http://ui")
    text = stream.getvalue()
    for expected in (
        "train/a: complete, 20 updates in 1:00",
        "reward      0.000 -> 0.900",
        "evaluation  0.100 after update 0 -> 0.800 after update 10",
        "mean reward of each update",
        "What is 3 * 4?",
        "'12'",
        f"{root}/export-hf",
        f"{root}/checkpoints/metrics.jsonl",
        "next: perdure run run.toml --set",
    ):
        assert expected in text, expected


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path) -> None:
    stream = io.StringIO()
    ending = ending_of(str(tmp_path), complete(RunState.STOPPED))
    show_ending(Console(file=stream, width=100), ending, ["run.toml"], None)
    assert stream.getvalue().rstrip().endswith("next: perdure run run.toml")
