"""The checks of the smoke script, on the files that a run leaves."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0


def check(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "scripts/gpu_smoke_checks.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def result(file: Path, **changed: Any) -> str:
    told = {"state": "complete", "updates": 60, "seconds": 90.0}
    file.write_text(json.dumps(told | {"reward_first": 0.25, "reward_last": 0.75} | changed))
    return str(file)


@pytest.mark.parametrize(
    ("changed", "code"),
    [({}, 0), ({"reward_last": 0.5}, 1), ({"state": "failed"}, 1), ({"reward_last": None}, 1)],
)
def test_a_reward_must_rise(tmp_path: Path, changed: dict[str, Any], code: int) -> None:
    done = check("rises", result(tmp_path / "result.json", **changed), "0.3")
    assert done.returncode == code
    if not changed:
        assert done.stdout == "reward 0.250 -> 0.750 in 60 updates, 90 s\n"


def fleet(root: Path, pid: int, incarnation: int) -> None:
    row = {"role": "engine", "rank": 0, "pid": pid, "incarnation": incarnation, "url": "http://x"}
    staged = root / "fleet.part"
    staged.write_text(json.dumps([row]))
    os.replace(staged, root / "fleet.json")


def run_of(root: Path, updates: int, state: str) -> None:
    (root / "checkpoints").mkdir(exist_ok=True)
    (root / "checkpoints" / "updates.jsonl").write_text("{}\n" * updates)
    (root / "workflow.json").write_text(json.dumps({"status": state}))


def test_the_engine_is_killed_and_its_replacement_awaited(tmp_path: Path) -> None:
    run_of(tmp_path, 5, "training")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as engine:
        fleet(tmp_path, engine.pid, 0)
        with subprocess.Popen(
            [sys.executable, "scripts/gpu_smoke_checks.py", "kill", str(tmp_path), "5", "20"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        ) as killing:
            assert engine.wait(DEADLINE_S) == -9
            assert killing.poll() is None  # it waits for another
            fleet(tmp_path, os.getpid(), 1)
            told, _ = killing.communicate(timeout=DEADLINE_S)
    assert killing.returncode == 0
    assert f"killed engine-0, process {engine.pid}, after 5 updates" in told
    assert "replaced after" in told


def test_a_run_that_fails_ends_the_wait(tmp_path: Path) -> None:
    run_of(tmp_path, 1, "failed")
    started = time.monotonic()
    done = check("kill", str(tmp_path), "5", "60")
    assert done.returncode == 1
    assert "failed before" in done.stderr
    assert time.monotonic() - started < DEADLINE_S


@pytest.mark.parametrize(
    ("updates", "state", "life", "code"),
    [(16, "complete", 1, 0), (16, "complete", 0, 1), (15, "complete", 1, 1), (16, "failed", 1, 1)],
)
def test_a_recovered_run_is_complete_with_another_engine(
    tmp_path: Path, updates: int, state: str, life: int, code: int
) -> None:
    run_of(tmp_path, updates, state)
    fleet(tmp_path, 1, life)
    assert check("recovered", str(tmp_path), "16").returncode == code


def test_stages_are_medians_without_the_first_update(tmp_path: Path) -> None:
    run_of(tmp_path, 3, "complete")
    rows = [
        {"stage": "training", "rollout_id": update, "seconds": seconds}
        for update, seconds in ((None, 9.0), (0, 9.0), (1, 1.0), (2, 3.0))
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "checkpoints" / "driver_timing.jsonl").write_text(lines)
    told = check("stages", str(tmp_path)).stdout.split()
    assert told == ["training", "2", "x", "2.000", "s", "(median)"]


def test_an_unknown_step_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "scripts/gpu_smoke.sh", "doctor", "nonsense"],
        cwd=ROOT,
        env=os.environ | {"OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert "no step 'nonsense'" in done.stderr
    assert not list((tmp_path / "out").iterdir())
