"""``perdure status`` of one run without a server: details, verification, wrong input."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from activities.storage import layout
from tests.support.completed_run import CompletedRun
from workers.cli.app import run_command
from workers.cli.status_attempts import newest
from workers.cli.status_details import warnings_of
from workers.cli.status_verify import verify_run

pytestmark = pytest.mark.usefixtures("no_server")


@pytest.fixture
def no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_STATE_DIR", str(tmp_path / "state"))
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_PROFILE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> CompletedRun:
    return CompletedRun(str(tmp_path_factory.mktemp("made") / "root"), export_hf=False)


@pytest.fixture
def run(finished: CompletedRun, tmp_path: Path) -> CompletedRun:
    return finished.copied_to(tmp_path / "root")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the one JSON document."""
    code = run_command(["status", *arguments, "--json"])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    document: dict[str, Any] = json.loads(out)
    return code, document


def failing(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Check -> its flaws, of the checks that do not hold."""
    checks = document["verification"]["checks"]
    return {check["name"]: check["flaws"] for check in checks if not check["holds"]}


def run_file(run: CompletedRun, folder: Path, **data: Any) -> str:
    """A run file that means the made run, its root the one at hand."""
    document = run.document | {"data": run.document["data"] | data}
    document["output"] = document["output"] | {"root": run.store.root}
    path = folder / "run.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_complete_root_is_verified_by_its_files(
    run: CompletedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = answer(capsys, run.store.root, "--verify")
    assert code == 0
    assert document["verification"]["complete"] is True
    assert [check["name"] for check in document["verification"]["checks"]] == [
        *("owner", "run file", "state", "prepared", "updates", "collections", "publication"),
        *("evaluations", "checkpoints", "prompts", "export"),
    ]
    (row,) = document["runs"]
    assert (row["run_id"], row["state"], row["update"], row["total"]) == (
        *("train/made", "complete"),
        *(8, 8),
    )
    assert row["workflow_json"]["status"] == "complete"


def test_attempts_are_those_of_the_root(
    run: CompletedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.store.write_json(layout.ATTEMPTS_JSON, [{"attempt": 0}, {"attempt": 1, "started_unix": 0}])
    actor = {"role": "engine", "pid": 2**30, "host": "node-7", "alive": True}
    lives = [actor | {"rank": 0, "incarnation": 2}, actor | {"rank": 1, "incarnation": 0}]
    run.store.write_json("fleet.json", lives)
    replaced = {"engine": "engine-0", "incarnation": 1, "phase": "load", "error": "out of memory"}
    row = {"version": 8, "replaced": [replaced]}
    run.store.append_jsonl(layout.PUBLICATION, row)
    run.store.append_jsonl(layout.PUBLICATION, {"version": 9, "replaced": []})
    code, document = answer(capsys, run.store.root)
    assert code == 0
    workflow, first, second = document["runs"][0]["attempts"]
    assert (workflow["task"], workflow["attempt"], workflow["state"]) == ("workflow", 1, "complete")
    assert (first["task"], first["rank"], first["attempt"]) == ("engine", 0, 2)
    assert (first["last_failure"], first["reason"]) == ("load", "out of memory")
    assert (first["state"], first["host"]) == ("running", "node-7")
    assert (second["rank"], second["attempt"], second["reason"]) == (1, 0, None)


def test_engine_that_died_between_publications_has_its_log(
    run: CompletedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    actor = {"role": "engine", "rank": 1, "pid": 2**30, "host": "a", "incarnation": 3}
    run.store.write_json("fleet.json", [actor])
    _, document = answer(capsys, run.store.root)
    engine = document["runs"][0]["attempts"][-1]
    assert engine["reason"].endswith(f"see {run.store.root}/logs/engine-1.log")


def test_a_process_says_when_and_why_it_was_started_again(
    run: CompletedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.time() - 90
    actor = {
        **{"role": "trainer", "rank": 0, "pid": 2**30, "host": "node-7", "incarnation": 1},
        **{"started_unix": started, "last_failure": "TrainerLost", "reason": "trainer died"},
        "of_a_later_version": 1,
    }
    run.store.write_json("fleet.json", [actor])
    _, document = answer(capsys, run.store.root)
    trainer = document["runs"][0]["attempts"][-1]
    assert (trainer["task"], trainer["attempt"], trainer["host"]) == ("trainer", 1, "node-7")
    assert (trainer["last_failure"], trainer["reason"]) == ("TrainerLost", "trainer died")
    assert trainer["age_s"] == pytest.approx(90, abs=30)


KILLED = "rank 1 of 3 of the trainer was ended by SIGKILL; its log is logs/trainer-rank1.log"


def ranks_of(
    run: CompletedRun, capsys: pytest.CaptureFixture[str], life: int, events: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What ``status`` says of the trainer's ranks, by the files of a run that is under way."""
    died = {"last_failure": "TrainerLost", "reason": "trainer died during progress()"}
    actor = {
        **{"role": "trainer", "rank": 0, "pid": 2**30, "host": "node-7", "incarnation": life},
        **({} if life == 0 else died),
    }
    state = run.store.read_json(layout.WORKFLOW_JSON)
    run.store.write_json(layout.WORKFLOW_JSON, state | {"status": "training"})
    run.store.write_json("fleet.json", [actor])
    for event in events:
        run.store.append_jsonl(layout.TRAINER_RANKS, {"host": "node-7"} | event)
    _, document = answer(capsys, run.store.root)
    return [each for each in document["runs"][0]["attempts"] if each["task"] == "trainer"]


def begun(life: int, rank: int) -> dict[str, Any]:
    """A rank that began a minute ago."""
    pid = 2**30 + 10 * life + rank
    return {"incarnation": life, "rank": rank, "pid": pid, "time_unix": time.time() - 60}


def ended(life: int, rank: int, how: str) -> dict[str, Any]:
    return {"incarnation": life, "rank": rank, "time_unix": time.time(), "ended": how}


def test_each_rank_of_a_trainer_has_its_newest_attempt(
    run: CompletedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    first_life = [begun(0, 1), begun(0, 2), ended(0, 1, KILLED), ended(0, 2, "a follower")]
    rows = ranks_of(run, capsys, 1, [*first_life, begun(1, 1), begun(1, 2)])
    assert [(row["rank"], row["attempt"], row["state"]) for row in rows] == [
        (0, 1, "running"),
        (1, 1, "running"),
        (2, 1, "running"),
    ]
    assert [row["pid"] for row in rows] == [2**30, 2**30 + 11, 2**30 + 12]
    assert {row["host"] for row in rows} == {"node-7"}
    assert rows[1]["age_s"] == pytest.approx(60, abs=30)
    assert {row["last_failure"] for row in rows} == {"TrainerLost"}
    because = f"ended because {KILLED}"
    assert [row["reason"] for row in rows] == [because, KILLED, because]


def test_a_rank_that_died_is_named_while_nothing_lives_again(
    run: CompletedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ranks_of(run, capsys, 0, [begun(0, 1), begun(0, 2), ended(0, 1, KILLED)])
    assert [(row["rank"], row["attempt"]) for row in rows] == [(0, 0), (1, 0), (2, 0)]
    assert [row["state"] for row in rows] == ["lost", "lost", "lost"]
    assert [row["age_s"] for row in rows] == [None, None, None]
    because = f"ended because {KILLED}"
    assert [row["reason"] for row in rows] == [because, KILLED, because]


def test_ranks_whose_trainer_died_ended_with_it(
    run: CompletedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ranks_of(run, capsys, 1, [begun(0, 1), begun(1, 1)])
    died = "trainer died during progress()"
    assert [row["reason"] for row in rows] == [died, f"ended with the trainer: {died}"]
    assert {row["last_failure"] for row in rows} == {"TrainerLost"}


def test_ranks_that_a_new_trainer_has_not_started_yet_are_those_of_the_life_before(
    run: CompletedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ranks_of(run, capsys, 1, [begun(0, 1)])
    assert [(row["rank"], row["attempt"], row["state"]) for row in rows] == [
        (0, 1, "running"),
        (1, 0, "lost"),
    ]
    assert (rows[1]["last_failure"], rows[1]["reason"]) == (None, None)


def test_a_flaw_is_printed_with_path_and_remedy(
    run: CompletedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"{run.checkpoint_of(7)}/state.json"
    run.store.write_bytes(path, b"?" * run.store.size(path))
    assert run_command(["status", run.store.root, "--verify"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (at,) = [n for n, line in enumerate(lines) if line.startswith(f"{run.store.root}/{path}: ")]
    assert "other content" in lines[at]
    assert lines[at + 1].startswith("  restore it from a copy")
    assert lines[-1] == f"{run.store.root}: not proved complete (checkpoints)"


def test_without_a_server_a_run_file_is_not_proved_complete(
    run: CompletedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = answer(capsys, run_file(run, tmp_path), "--verify")
    assert code == 1
    flaws = failing(document)
    assert flaws.keys() == {"workflow", "run file"}  # the copy's root is another one
    (flaw,) = flaws["workflow"]
    assert "perdure up" in flaw["problem"]
    assert f"perdure status {run.store.root} --verify" in flaw["remedy"]
    (differs,) = flaws["run file"]
    assert "output.root" in differs["problem"]


def test_edited_run_file_is_told_by_its_keys(
    run: CompletedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = answer(capsys, run_file(run, tmp_path, seed=99), "--verify")
    assert code == 1
    (flaw,) = failing(document)["run file"]
    assert "data.seed" in flaw["problem"]
    assert flaw["path"] == str(tmp_path / "run.json")


def test_root_of_another_run(
    run: CompletedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(run, tmp_path)
    code, document = answer(capsys, path, "--verify", "--set", 'name="other"')
    assert code == 1
    problems = {flaw["problem"] for flaw in failing(document)["owner"]}
    assert problems == {"belongs to train/made, not to train/other"}


def test_run_file_whose_root_holds_no_run(
    run: CompletedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, nowhere = run_file(run, tmp_path), tmp_path / "nowhere"
    code, document = answer(capsys, path, "--verify", "--set", f'output.root="{nowhere}"')
    assert code == 1
    (flaw,) = failing(document)["root"]
    assert flaw["path"] == str(nowhere)
    assert "holds no run" in flaw["problem"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--verify"], 2, "--verify needs a run"),
        (["--follow"], 2, "--follow needs a run"),
        (["somebody", "--verify"], 3, "perdure up"),
        (["somebody", "--set", "data.seed=1"], 2, "changes a run file"),
        (["no/such.toml", "--verify"], 2, "no such file"),
    ],
)
def test_requests_that_cannot_be_met(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["status", *arguments]) == code
    assert says in capsys.readouterr().err


def test_a_root_is_not_followed(run: CompletedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["status", run.store.root, "--follow"]) == 2
    assert "not its root" in capsys.readouterr().err


def test_run_that_the_server_does_not_know_is_not_complete() -> None:
    found = verify_run("train/nobody", "", None, None, None)
    assert found["complete"] is False
    (check,) = found["checks"]
    assert check["flaws"][0]["problem"] == "the server knows no such run"


@pytest.mark.parametrize(
    ("state", "warning"),
    [
        ({"run_id": "train/a", "status": "complete", "update": 3}, None),
        (
            {"run_id": "train/a", "status": "training", "update": 3},
            "/r/workflow.json says training, Temporal says complete",
        ),
        (
            {"run_id": "train/a", "status": "complete", "update": 2},
            "/r/workflow.json says 2 updates, Temporal says 3",
        ),
        (
            {"run_id": "train/b", "status": "complete", "update": 3},
            "/r/workflow.json belongs to train/b, another run owns this root",
        ),
        ({}, "/r/workflow.json cannot be read; Temporal says complete"),
    ],
)
def test_files_that_differ_from_the_server(state: dict[str, Any], warning: str | None) -> None:
    run = {"run_id": "train/a", "state": "complete", "update": 3, "root": "/r"}
    found = warnings_of(run, {"state": state, "identity": "1"}, "1")
    assert found == ([] if warning is None else [warning])


def test_submitted_identity_differs_from_the_recorded_one() -> None:
    run = {"run_id": "train/a", "state": "training", "update": 3, "root": "/r"}
    state = {"run_id": "train/a", "status": "training", "update": 0}
    (warning,) = warnings_of(run, {"state": state, "identity": "1"}, "2")
    assert warning == "/r/run-spec.json means 1, submitted was 2"


def test_newest_attempt_of_each_task_and_rank() -> None:
    keys = [("engine", 0, 1), ("engine", 1, 0), ("engine", 0, 0), ("trainer", 0, 0)]
    rows = [{"task": task, "rank": rank, "attempt": attempt} for task, rank, attempt in keys]
    assert newest(rows) == [rows[0], rows[1], rows[3]]


def test_plain_status_loads_no_slow_library(run: CompletedRun) -> None:
    code = (
        "import sys\n"
        "from workers.cli.app import run_command\n"
        f"assert run_command(['status', {run.store.root!r}, '--json']) == 0\n"
        "slow = {'torch', 'ray', 'transformers', 'pyarrow', 'safetensors'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
