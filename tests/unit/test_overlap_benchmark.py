"""The overlap benchmark reads a run's artifacts right, and its run files are valid."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from activities.storage import layout
from activities.storage.store import Store
from configs.load import load_run

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("async_overlap", BENCHMARKS / "async_overlap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["async_overlap"] = module
    spec.loader.exec_module(module)
    return module


def test_warm_up_does_not_count(benchmark: ModuleType, tmp_path: Path) -> None:
    """Three slow updates, then four of 2 s of training and 0.5 s of publication, 0.1 s between."""
    store = Store(tmp_path)
    clock = 100.0

    def stage(name: str, update: int | None, seconds: float) -> None:
        nonlocal clock
        row = {"stage": name, "rollout_id": update, "started_unix": clock, "seconds": seconds}
        store.append_jsonl(layout.DRIVER_TIMING, {**row, "passed": True})
        clock += seconds + 0.1

    stage("initial_publication", None, 9.0)
    for update in range(7):
        slow = 10.0 if update < 3 else 1.0
        stage("generation_wait", update, 0.2 * slow)
        stage("training", update, 2.0 * slow)
        stage("publication", update, 0.5 * slow)
        common = {"update": update, "train/lag": 2.0, "train/cpu_seconds": slow}
        store.append_jsonl(
            layout.METRICS, {"kind": "train", "train/step_seconds": 1.9 * slow, **common}
        )
        lengths = {"rollout/response_len/max": 48, "rollout/response_len/mean": 38.0}
        store.append_jsonl(
            layout.METRICS,
            {"kind": "rollout", "update": update, "rollout/seconds": 1.8 * slow, **lengths},
        )
    found = benchmark.read_run(store)
    assert found["updates"] == 4
    assert found["seconds_per_update"] == pytest.approx(0.2 + 2.0 + 0.5 + 3 * 0.1)
    assert found["train_seconds"] == pytest.approx(1.9)
    assert found["rollout_seconds"] == pytest.approx(1.8)
    assert found["stage_seconds"] == pytest.approx(
        {"generation_wait": 0.2, "training": 2.0, "publication": 0.5}
    )
    assert (found["lag"], found["decode_steps"]) == (2.0, 48)


def test_both_runs_differ_in_nothing_but_asynchrony(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = benchmark.Bench(tmp_path, groups=16)
    bench.prepare()
    monkeypatch.setattr(bench, "_perdure", lambda *arguments, **options: None)
    monkeypatch.setattr(benchmark, "read_run", lambda store: {})
    documents = []
    for fully_async in (False, True):
        bench.run("same", 53, 12.5, fully_async=fully_async)
        documents.append(load_run(str(tmp_path / "same.toml"), []).spec)
    sequential, overlapped = documents
    assert (sequential.fully_async, overlapped.fully_async) == (False, True)
    assert overlapped.core.publication_mode == "refresh"
    for section in ("training", "optimizer", "inference", "trainer", "model", "data", "launch"):
        assert getattr(sequential, section) == getattr(overlapped, section)
    assert overlapped.launch.env == {"PERDURE_ENGINE_STEP_DELAY_MS": "12.500"}
    assert overlapped.asynchronous.async_max_concurrent_samples is None
