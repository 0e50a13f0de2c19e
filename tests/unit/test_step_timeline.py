"""What a time line says of a trace whose times are known."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("step_timeline")


def event(category: str, name: str, begin: float, end: float, **told: Any) -> dict[str, Any]:
    times = {"ts": begin * 1e3, "dur": (end - begin) * 1e3}
    return {"ph": "X", "cat": category, "name": name, **times, "args": told}


EVENTS = [
    event("user_annotation", "stage: whole update", 0, 100),
    event("user_annotation", "stage: forward and backward", 5, 60),
    event("user_annotation", "stage: small values of ranks", 70, 72),
    event("user_annotation", "stage: small values of ranks", 80, 83),
    event("cpu_op", "aten::mm", 85, 99),
    event("cuda_runtime", "cudaLaunchKernel", 6, 6.01, correlation=1),
    event("cuda_runtime", "cudaLaunchKernel", 19.99, 19.995, correlation=2),
    event("cuda_runtime", "cudaLaunchKernel", 7, 7.01, correlation=3),
    event("kernel", "nvjet", 10, 20, correlation=1),
    event("kernel", "triton", 20, 40, correlation=2),
    event("kernel", "ncclDevKernel_ReduceScatter", 30, 55, correlation=3),
    event("gpu_memcpy", "Memcpy DtoH", 55, 60),
    event("gpu_user_annotation", "stage: whole update", 0, 100),
    {"ph": "i", "cat": "kernel", "name": "mark", "ts": 0.0},
]


def test_times_are_told_apart(module):
    seen = module.timeline(EVENTS, 100.0, [("aten::mm", 1, 14.0)])
    assert seen.compute == pytest.approx(35.0)
    assert seen.nccl == pytest.approx(25.0)
    assert seen.exposed == pytest.approx(15.0)
    assert seen.idle == pytest.approx(50.0)
    assert seen.prompt == pytest.approx(1 / 3)
    assert seen.stages["whole update"] == pytest.approx((1, 100.0, 15.0, 50.0))
    assert seen.stages["forward and backward"] == pytest.approx((1, 55.0, 15.0, 5.0))
    assert seen.stages["small values of ranks"] == pytest.approx((2, 5.0, 0.0, 5.0))
    assert seen.stages["compare scores"] == (0, 0.0, 0.0, 0.0)
    assert [(at, size) for at, size, _ in seen.gaps] == [(0.0, 10.0), (60.0, 40.0)]
    assert seen.gaps[1][2] == "stage: whole update > stage: small values of ranks"
    assert "  of it exposed" in seen.table()


def test_without_a_gpu_nothing_is_idle(module):
    seen = module.timeline(EVENTS[:5], 100.0, [])
    assert (seen.compute, seen.nccl, seen.idle, seen.gaps) == (0.0, 0.0, 0.0, [])


@pytest.mark.parametrize(
    ("spans", "taken", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(2, 3), (5, 6)], [(0, 2), (3, 5), (6, 10)]),
        ([(0, 4), (6, 10)], [(3, 7)], [(0, 3), (7, 10)]),
        ([(0, 4), (6, 10)], [(-1, 0), (4, 6), (10, 12)], [(0, 4), (6, 10)]),
    ],
)
def test_what_is_left_of_times(module, spans, taken, left):
    assert module.without(spans, taken) == left


def test_times_that_overlap_are_one(module):
    assert module.union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
