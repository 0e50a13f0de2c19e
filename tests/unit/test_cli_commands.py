import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.errors import (
    ConfigurationError,
    OwnershipError,
    RequestRefused,
    ServiceUnreachable,
    TrainerLost,
)
from workers.cli.app import run_command
from workers.cli.errors import exit_code, report
from workers.cli.names import run_id_of
from workers.cli.place import Place, find_place
from workers.local_stack import StackInfo

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs" / "recipes" / "tiny.toml")
NOBODY = "127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_STATE_DIR", str(tmp_path / "state"))
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_PROFILE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def perdure(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workers", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=ROOT,
    )


def test_heavy_modules_stay_out_of_help_and_validate() -> None:
    code = (
        "import sys\n"
        "from workers.cli.app import run_command\n"
        f"assert run_command(['--help']) == 0\n"
        f"assert run_command(['validate', {TINY!r}]) == 0\n"
        f"assert run_command(['plan', {TINY!r}]) == 0\n"
        "heavy = {'torch', 'ray', 'transformers', 'temporalio', 'pyarrow', 'fsspec'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


def test_validate_says_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["validate", TINY]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{TINY}: valid, train/tiny, sha256 ")
    assert out.count("\n") == 1


def test_a_wrong_key_is_one_line_and_exit_2(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(Path(TINY).read_text().replace("num_rollouts", "num_rollout"))
    done = perdure("validate", str(path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"perdure: {path}: training.num_rollout = 100: unknown key in [training]; "
        "did you mean 'num_rollouts'?\n"
    )


@pytest.mark.parametrize("arguments", [["--debug", "validate"], ["validate", "--debug"]])
def test_debug_shows_the_traceback(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([*arguments, "nowhere.toml"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ('model={source="./nowhere"}', "model.source"),
        ('output.root="/proc/version/x"', "output.root"),
    ],
)
def test_inputs_that_are_missing_on_this_machine(
    override: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("validate", "run"):
        assert run_command([verb, TINY, "--set", override]) == 2
        assert capsys.readouterr().err.startswith(f"perdure: {TINY}: {problem} = ")
    assert run_command(["validate", TINY, "--set", override, "--no-inputs"]) == 0


def test_an_engine_that_is_not_installed_here_is_warned_of_and_refused_by_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERDURE_STATE_DIR", str(tmp_path / "state"))  # no stack runs there
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    without = tmp_path / "python"
    without.write_text("#!/bin/sh\necho\n")
    without.chmod(0o755)
    monkeypatch.setenv("PERDURE_SGLANG_PYTHON", str(without))
    told = [TINY, "--set", 'inference.engine="sglang"', "--set", f'output.root="{tmp_path}/root"']
    assert run_command(["validate", *told]) == 0
    seen = capsys.readouterr()
    assert f'warning no_sglang_here: inference.engine = "sglang": {without} has no' in seen.err
    assert ": valid, " in seen.out
    assert run_command(["run", *told]) == 2
    assert f"{without} has no SGLang; install the extra" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # engines may start there
    assert run_command(["validate", *told]) == 0
    assert "no_sglang_here" not in capsys.readouterr().err


def test_prompt_files_that_are_missing_or_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        'schema_version = 1\nname = "a"\nmodel.source = "model"\noutput.root = "out"\n'
        'data.prompt_data = "train.jsonl"\n'
    )
    model = tmp_path / "model"
    model.mkdir()
    assert run_command(["validate", str(run_file)]) == 2
    err = capsys.readouterr().err
    assert "has no config.json" in err
    assert f'data.prompt_data = "{tmp_path}/train.jsonl": no such file' in err
    (model / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").touch()
    assert run_command(["validate", str(run_file)]) == 2
    err = capsys.readouterr().err
    assert "holds no *.safetensors" in err
    assert "the file is empty" in err


def test_render_and_schema_are_pure_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "render", TINY]) == 0
    rendered = json.loads(capsys.readouterr().out)
    assert set(rendered) == {"config", "config_sha256", "config_path"}
    assert run_command(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$schema"].endswith("2020-12/schema")


@pytest.mark.parametrize("arguments", [["nope"], ["run"], ["validate", TINY, "--nope"]])
def test_usage_errors_are_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", TINY, "--address", NOBODY],
        ["start", TINY, "--address", NOBODY, "--json"],
        ["wait", "tiny", "--address", NOBODY],
        ["pause", "tiny", "--address", NOBODY],
        ["status", "--address", NOBODY, "--json"],
    ],
)
def test_an_unreachable_server_is_3_within_seconds(arguments: list[str]) -> None:
    started = time.monotonic()
    done = perdure(*arguments)
    assert done.returncode == 3, done.stderr
    assert time.monotonic() - started < 12
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"perdure: Temporal at {NOBODY} does not answer")
    assert done.stdout == ""


def test_control_verbs_need_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["stop", "tiny"]) == 3
    assert "perdure up" in capsys.readouterr().err


def test_status_without_a_stack_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": [], "processes": []}


def test_the_equivalent_command_is_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["pause", "tiny", "--address", NOBODY]) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "same as: temporal workflow update execute --workflow-id train/tiny --name pause "
        f"--address {NOBODY} --namespace default\n"
    )


@pytest.mark.parametrize(
    ("environment", "stack", "words"),
    [
        ({}, False, "--address a:1 --namespace default"),
        ({"TEMPORAL_NAMESPACE": "rl"}, False, "--address a:1 --namespace rl"),
        ({"TEMPORAL_PROFILE": "prod"}, False, "--address a:1 --profile prod"),
        ({"TEMPORAL_NAMESPACE": "rl"}, True, "--address a:1 --namespace default"),
        ({"TEMPORAL_CONFIG_FILE": TINY}, False, "--address a:1"),
    ],
)
def test_the_equivalent_command_goes_where_the_connection_goes(
    environment: dict[str, str], stack: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TEMPORAL_NAMESPACE", "TEMPORAL_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    info = StackInfo(temporal_address="a:1", temporal_ui="", ray_address="", state_dir="")
    place = Place("a:1", stack=info if stack else None)
    assert place.stock("workflow", "list") == f"temporal workflow list {words}"


@pytest.mark.parametrize(
    ("text", "run_id"),
    [("tiny", "train/tiny"), ("train/x", "train/x"), (TINY, "train/tiny")],
)
def test_names_of_runs(text: str, run_id: str) -> None:
    assert run_id_of(text) == run_id


def test_an_address_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "b:2")
    assert find_place("a:1") == Place("a:1")
    assert find_place(None) == Place("b:2")
    monkeypatch.delenv("TEMPORAL_ADDRESS")
    monkeypatch.setenv("TEMPORAL_PROFILE", "prod")
    assert find_place(None) == Place(None)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("x"), 2),
        (OwnershipError("x"), 2),
        (ServiceUnreachable("x"), 3),
        (TrainerLost("x"), 1),
        (RequestRefused("x"), 1),
        (RuntimeError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(error) == code
    assert report(error, debug=False) == code
    assert capsys.readouterr().err.startswith("perdure: ")


def test_the_console_script_is_the_same_program() -> None:
    script = Path(sys.executable).parent / "perdure"
    assert os.access(script, os.X_OK)
    done = subprocess.run([script, "version"], capture_output=True, text=True, check=True)
    assert done.stdout == perdure("version").stdout
