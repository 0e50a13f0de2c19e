"""``doctor gpu``: the machine, measurements in child processes, and its verdict."""

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from configs.load import load_run
from workers.preflight import gpu as gpu_module
from workers.preflight import machine
from workers.preflight.agreement import measure_agreement
from workers.preflight.ceilings import copy_rate, data_sheet, product_rate
from workers.preflight.collectives import all_reduce
from workers.preflight.finding import Finding
from workers.preflight.gpu import Subject, examine_gpus, on_one_gpu
from workers.preflight.probe import ProbeFailed, run_probe
from workers.preflight.subject import subject_of

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "configs" / "recipes"
H200 = "0, NVIDIA H200, 143771, 580.159.04, 9.0\n"
TINY = [
    "model.tiny.hidden_size=32",
    "model.tiny.num_layers=1",
    "model.tiny.num_heads=2",
    "model.tiny.num_kv_heads=1",
    "model.tiny.warmup_accuracy=0.0",
]
DEADLINE_S = 50.0


def put_program(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ``nvidia-smi`` that stands before any other."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_driver_tells_of_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = "1, Tesla V100-SXM2-16GB, 16384, 580.159.04, 7.0"
    put_program(tmp_path, f"cat <<EOF\n{H200}{old}\nEOF", monkeypatch)
    first, second = machine.gpu_findings(machine.gpus())
    assert first.seen == "NVIDIA H200, 143771 MiB, driver 580.159.04, capability 9.0"
    assert (first.ok, second.ok) == (True, False)  # no bfloat16 before capability 8.0


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'NVIDIA-SMI has failed: no driver'; exit 9", "NVIDIA-SMI has failed: no driver"),
        ("sleep 60", "timed out"),
    ],
)
def test_a_driver_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    put_program(tmp_path, script, monkeypatch)
    monkeypatch.setattr(machine, "SMI_TIMEOUT_S", 0.5)
    findings = examine_gpus(None, print)
    (absent,) = [finding for finding in findings if finding.check == "GPU"]
    assert absent.ok is False
    assert reason in absent.seen
    assert not machine.has_gpu()


def test_without_a_gpu_it_says_so_and_what_it_could_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = [sys.executable, "-m", "workers", "doctor", "gpu", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    report = json.loads(done.stdout)
    rows = {row["check"]: row for row in report["findings"]}
    assert done.returncode == 1
    assert rows["GPU"] == {
        "check": "GPU",
        "expected": "at least one",
        "seen": "no NVIDIA driver: nvidia-smi is not on PATH",
        "ok": False,
    }
    assert rows["torch"] == {
        "check": "torch",
        "expected": "installed",
        "seen": version("torch"),
        "ok": True,
    }
    assert report["failed"] == sum(row["ok"] is False for row in report["findings"])


def test_a_file_that_is_not_there_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "workers", "doctor", "gpu", "absent.toml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert "absent.toml: no such run file or model folder" in done.stderr


MEASURED: dict[str, Any] = {
    "ceilings": {"name": "NVIDIA H200", "copy": 4.3e12, "product": 790e12},
    "all_reduce": {"ranks": 2, "right": True, "bus_rate": 4.0e11},
}


def on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> dict[str, Finding]:
    """Findings on a machine of two GPUs whose measurements give ``MEASURED``, or raise."""
    put_program(tmp_path, f"printf '{H200}{H200.replace('0,', '1,', 1)}'", monkeypatch)
    told = MEASURED | changed

    def probe(name: str, argument: Any, timeout_s: float) -> Any:
        if isinstance(told[name], Exception):
            raise told[name]
        return told[name]

    monkeypatch.setattr(gpu_module, "run_probe", probe)
    return {finding.check: finding for finding in examine_gpus(None, print)}


def test_a_healthy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = on_gpus(tmp_path, monkeypatch)
    assert rows["GPU 1 copy"] == Finding("GPU 1 copy", ">= 2.4 TB/s", "4.3 TB/s", True)
    assert rows["GPU 0 bfloat16 product"].seen == "790 TFLOP/s"
    assert rows["GPU 0 bfloat16 product"].ok is True
    assert rows["NCCL all-reduce"].seen == "right, 400 GB/s of bus"
    assert rows["NCCL all-reduce"].ok is True


@pytest.mark.parametrize(
    ("changed", "check", "seen"),
    [
        (
            {"ceilings": MEASURED["ceilings"] | {"copy": 2.3e12}},
            "GPU 0 copy",
            "2.3 TB/s",
        ),
        (
            {"all_reduce": MEASURED["all_reduce"] | {"right": False}},
            "NCCL all-reduce",
            "WRONG, 400 GB/s of bus",
        ),
        ({"all_reduce": ProbeFailed("no result")}, "NCCL all-reduce", "no result"),
        ({"ceilings": ProbeFailed("out of memory")}, "GPU 1 rates", "out of memory"),
    ],
)
def test_an_unfit_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Any, check: str, seen: str
) -> None:
    finding = on_gpus(tmp_path, monkeypatch, **changed)[check]
    assert (finding.seen, finding.ok) == (seen, False)


def test_a_gpu_without_a_data_sheet_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = MEASURED["ceilings"] | {"name": "NVIDIA B300"}
    assert on_gpus(tmp_path, monkeypatch, ceilings=unknown)["GPU 0 copy"].ok is None
    assert data_sheet("NVIDIA H100 80GB HBM3") == (3.35e12, 989e12)


def test_rates_are_of_the_work_that_was_done() -> None:
    cpu = torch.device("cpu")
    # between a kilobyte and a petabyte a second
    assert 1e6 < copy_rate(cpu, 1 << 20) < 1e15
    assert 1e6 < product_rate(cpu, 64) < 1e15


@pytest.mark.slow
def test_ranks_sum_what_they_hold() -> None:
    told = all_reduce(2, "gloo", 1000)
    assert (told["ranks"], told["right"]) == (2, True)
    assert told["bus_rate"] > 0


def test_a_probe_that_refuses_says_why() -> None:
    with pytest.raises(ProbeFailed, match="KeyError: 'no such probe'"):
        run_probe("no such probe", None, DEADLINE_S)


def test_a_probe_that_hangs_is_ended_with_all_its_processes() -> None:
    here = psutil.Process()
    before = set(here.children(recursive=True))
    started = time.monotonic()
    with pytest.raises(ProbeFailed, match=r"no result within 0\.3 s"):
        run_probe("all_reduce", [1], 0.3)
    assert time.monotonic() - started < DEADLINE_S
    assert set(here.children(recursive=True)) <= before


@pytest.fixture
def tiny(tmp_path: Path) -> Any:
    loaded = load_run(RECIPES / "tiny-ci.toml", [*TINY, f'output.root="{tmp_path}/run"'])
    return loaded.spec


@pytest.mark.slow
def test_an_engine_and_a_trainer_of_the_same_weights_agree(tiny: Any, tmp_path: Path) -> None:
    overrides = [*TINY, f'output.root="{tmp_path}/run"']
    with subject_of(RECIPES / "tiny-ci.toml", overrides, has_gpu=False) as subject:
        argument = {"spec": subject.spec.model_dump(mode="json"), "folder": str(subject.folder)}
        told = run_probe("agreement", argument, DEADLINE_S)
        # float32 on both sides
        assert told["mean"] < 1e-5
        assert told["tokens"] >= 8
        assert told["device"] == "cpu"
        scratch = subject.folder
    assert not scratch.exists()
    assert not Path(f"{tmp_path}/run").exists()


def test_a_gap_above_the_limit_is_a_failure(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"tokens": 400, "mean": 0.25, "p99": 1.0, "max": 2.0, "device": "cpu"}
    monkeypatch.setattr(gpu_module, "run_probe", lambda *_: told)
    monkeypatch.setattr(gpu_module, "examine_folder", lambda folder: [])
    findings = examine_gpus(Subject(tiny, tmp_path), print)
    assert (findings[-1].check, findings[-1].ok) == ("engine and trainer agree", False)
    assert findings[-1].seen.startswith("mean 0.2500, p99 1.000, max 2.000 over 400 tokens")
    core = tiny.core.model_copy(update={"max_train_rollout_logprob_abs_diff": 0.3})
    lenient = Subject(tiny.model_copy(update={"core": core}), tmp_path)
    assert examine_gpus(lenient, print)[-1].ok is True


def test_a_run_on_gpus_is_not_started_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_module, "examine_folder", lambda folder: [])
    spec = load_run(RECIPES / "gpu-2x-async.toml").spec
    last = examine_gpus(Subject(spec, tmp_path), print)[-1]
    assert (last.ok, last.seen) == (None, "not asked: the run needs a GPU")


def test_the_engine_leaves_room_for_the_trainer() -> None:
    spec = load_run(
        RECIPES / "gpu-2x-async.toml",
        ["inference.sglang.mem_fraction_static=0.9", 'inference.sglang.attention_backend="fa3"'],
    ).spec
    shared = on_one_gpu(spec)
    assert shared.placement.mode == "colocated"
    assert shared.inference.sglang == {"attention_backend": "fa3"}
    on_cpu = load_run(RECIPES / "tiny.toml").spec
    assert on_one_gpu(on_cpu) is on_cpu


def test_a_folder_gets_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    with subject_of(tmp_path, (), has_gpu=False) as subject:
        assert subject.folder == tmp_path
        assert subject.spec.inference.engine == "native"
        assert subject.spec.placement.mode == "cpu"
    monkeypatch.setattr("workers.preflight.subject.find_sglang", lambda: Path("sglang"))
    with subject_of(tmp_path, (), has_gpu=True) as subject:
        assert subject.spec.inference.engine == "sglang"
        assert subject.spec.placement.mode == "colocated"


def test_an_argument_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="schema_version"):
        measure_agreement({"spec": {}, "folder": str(tmp_path)})
