"""``perdure gpu-usage`` against the driver: right numbers, and no CUDA context of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def smi(*fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def test_samples_agree_with_the_driver_and_take_no_gpu(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="needs the package nvidia-ml-py")
    output = tmp_path / "gpu_usage_node0.jsonl"
    command = [sys.executable, "-m", "workers", "gpu-usage", str(output), "--seconds", "3"]
    sampling = subprocess.Popen([*command, "--interval", "1"], cwd=Path(__file__).parents[2])
    try:
        assert sampling.wait(timeout=60) == 0
    finally:
        sampling.kill()
        sampling.wait(timeout=10)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 3
    expected = {uuid: (int(i), int(mib)) for i, uuid, mib in smi("index", "uuid", "memory.total")}
    for row in rows:
        assert row["host"] == os.uname().nodename
        seen = {gpu["uuid"]: (gpu["index"], gpu["memory.total"]) for gpu in row["devices"]}
        assert seen == expected
        assert all(0 <= gpu["memory.used"] <= gpu["memory.total"] for gpu in row["devices"])
        assert all(gpu["utilization.gpu"] in (None, *range(101)) for gpu in row["devices"])


def test_looking_opens_no_context() -> None:
    pytest.importorskip("pynvml", reason="needs the package nvidia-ml-py")
    code = (
        "import ctypes, os, subprocess\n"
        "from workers.nvml import Nvml\n"
        "with Nvml() as nvml:\n"
        "    assert nvml.look()\n"
        "    query = ['nvidia-smi', '--query-compute-apps=pid', '--format=csv,noheader']\n"
        "    held = subprocess.run(query, capture_output=True, text=True, check=True).stdout\n"
        "    assert str(os.getpid()) not in held.split(), held\n"
        "    found = ctypes.c_void_p()\n"
        "    told = ctypes.CDLL('libcuda.so.1').cuCtxGetCurrent(ctypes.byref(found))\n"
        "    assert told == 3, told  # CUDA_ERROR_NOT_INITIALIZED\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
