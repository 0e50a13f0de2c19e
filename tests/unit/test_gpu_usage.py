"""Sampling of GPUs: rows, deadlines, bad options. The driver itself is in tests/gpu."""

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.errors import ConfigurationError
from workers.cli.app import run_command
from workers.gpu_samples import sample_gpus, triton_artifacts
from workers.nvml import Nvml

GIB = 1 << 30
ROW = {"index": 0, "uuid": "GPU-0", "utilization.gpu": 5}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class DriverError(Exception):
    pass


class Driver(SimpleNamespace):
    """As much of the module ``pynvml`` as is used: GPU 1 is a slice and tells no use."""

    NVMLError = DriverError
    nvmlMemory_v2 = object()
    closed = 0

    def nvmlInit(self) -> None:
        if self.missing:
            raise DriverError("NVML Shared Library Not Found")

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def nvmlDeviceGetCount(self) -> int:
        if self.lost:
            raise DriverError("GPU is lost")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return 100 + index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle == 101:
            raise DriverError("Not Supported")
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: object) -> SimpleNamespace:
        assert version is self.nvmlMemory_v2
        return SimpleNamespace(used=3 * GIB + 5, total=80 * GIB)


def test_what_a_gpu_does_not_tell_is_unknown() -> None:
    driver = Driver(missing=False, lost=False)
    with Nvml(driver) as nvml:
        first, second = nvml.look()
    assert first == {
        "index": 0,
        "uuid": "GPU-100",
        "utilization.gpu": 37,
        "utilization.memory": 12,
        "memory.used": 3072,
        "memory.total": 81920,
    }
    assert (second["index"], second["utilization.gpu"], second["memory.used"]) == (1, None, 3072)
    assert driver.closed == 1


def test_no_driver_is_a_clear_error() -> None:
    with pytest.raises(ConfigurationError, match="no NVIDIA driver answers here"):
        Nvml(Driver(missing=True, lost=False))


def test_a_lost_gpu_is_a_row_with_the_error(tmp_path: Path) -> None:
    driver = Driver(missing=False, lost=True)
    with Nvml(driver) as nvml:
        sample_gpus(str(tmp_path / "a.jsonl"), nvml.look, seconds=0.01, interval=1.0)
    (row,) = rows_of(tmp_path / "a.jsonl")
    assert row["error"] == "NVML: GPU is lost"
    assert "devices" not in row


def test_rows_are_an_interval_apart_and_end_in_time(tmp_path: Path) -> None:
    output = tmp_path / "checkpoints" / "gpu_usage_node0.jsonl"
    written = sample_gpus(str(output), lambda: [ROW], seconds=1.0, interval=0.4)
    rows = rows_of(output)
    assert written == len(rows)
    assert 2 <= written <= 3  # a machine that is late at one look does not make up for it
    assert all(row["devices"] == [ROW] and row["host"] for row in rows)
    sample_gpus(str(output), lambda: [ROW], seconds=0.01, interval=1.0)
    assert len(rows_of(output)) == written + 1


def test_a_driver_that_hangs_costs_rows_and_is_asked_once(tmp_path: Path) -> None:
    asked, release = [], threading.Event()

    def hang() -> list[dict[str, Any]]:
        asked.append(1)
        release.wait(10.0)
        return [ROW]

    output = tmp_path / "a.jsonl"
    try:
        sample_gpus(str(output), hang, seconds=0.5, interval=0.2, limit_s=0.05)
    finally:
        release.set()
    assert len(asked) == 1
    assert {row["error"] for row in rows_of(output)} == {"the driver did not answer within 0.05 s"}


def test_kernels_are_counted_by_worker_without_links(tmp_path: Path) -> None:
    parent = tmp_path / "caches"
    for name, files in (("worker-0", ("a/x.cubin", "b/y.cubin", "b/y.ptx")), ("worker-1", ())):
        (parent / name).mkdir(parents=True)
        for number, file in enumerate(files):
            path = parent / name / file
            path.parent.mkdir(exist_ok=True)
            path.touch()
            os.utime(path, (0, 1000 + number))
    (parent / "linked").symlink_to(parent / "worker-0")
    (parent / "worker-1" / "z.cubin").symlink_to(parent / "worker-0" / "a" / "x.cubin")
    assert triton_artifacts(parent) == [
        {"root": str(parent / "worker-0"), "cubins": 2, "newest_write_unix": 1001},
        {"root": str(parent / "worker-1"), "cubins": 0, "newest_write_unix": None},
    ]
    output = tmp_path / "a.jsonl"
    sample_gpus(str(output), lambda: [ROW], seconds=0.01, interval=1.0, triton_cache_parent=parent)
    assert [cache["cubins"] for cache in rows_of(output)[0]["triton_artifacts"]] == [2, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--interval", "0.9"], "--interval 0.9"),
        (["--interval", "inf"], "--interval inf"),
        (["--seconds", "0"], "--seconds 0.0"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--triton-cache-parent", "/no/such/folder"], "no such folder"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, capsys, options: list[str], message: str) -> None:
    output = tmp_path / "a.jsonl"
    assert run_command(["gpu-usage", str(output), *options]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()
