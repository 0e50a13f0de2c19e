"""What this machine has: driver and GPUs, torch, SGLang and the packages that hold kernels.

Nothing here imports torch or touches a GPU: versions are read from package metadata, of the
interpreter that runs SGLang where that is another one.
"""

import json
import subprocess
import sys
from typing import Any

from models.errors import ConfigurationError
from workers.engines.sglang.installed import sglang_python
from workers.preflight.finding import Finding

SMI_TIMEOUT_S = 30.0
"""The first question to a driver that is not loaded permanently takes seconds."""
VERSIONS_TIMEOUT_S = 30.0
GPU_FIELDS = ("index", "name", "memory.total", "driver_version", "compute_cap")
SMALLEST_CAPABILITY = 8.0
"""Compute capability from which a GPU computes in bfloat16."""
SGLANG_RELEASES = ("0.5.17", "0.5.18")
KERNELS = ("sglang-kernel", "flashinfer-python", "triton", "torch-memory-saver", "nvidia-nccl-cu13")
"""Packages of SGLang and torch that bring compiled code; the first has flash attention 3."""
COMPUTING = ("torch", "transformers")
"""What the trainer needs."""
SERVING = ("sglang", *KERNELS)
_VERSIONS = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def gpus() -> list[dict[str, str]]:
    """Every GPU that the driver shows, by the names in ``GPU_FIELDS``; memory in MiB.

    Raises:
        ConfigurationError: there is no driver, or it does not answer.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True
        )
    except FileNotFoundError as error:
        raise ConfigurationError("no NVIDIA driver: nvidia-smi is not on PATH") from error
    except subprocess.CalledProcessError as error:
        said = (error.stdout + error.stderr).strip().splitlines()
        raise ConfigurationError(f"nvidia-smi: {said[-1] if said else error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"nvidia-smi: {error}") from error
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(GPU_FIELDS)]


def has_gpu() -> bool:
    """Whether the driver shows a GPU."""
    try:
        return bool(gpus())
    except ConfigurationError:
        return False


def gpu_findings(found: list[dict[str, str]]) -> list[Finding]:
    """A row for every GPU."""
    expected = f"compute capability {SMALLEST_CAPABILITY:.1f} or more"
    return [
        Finding(
            f"GPU {gpu['index']}",
            expected,
            f"{gpu['name']}, {gpu['memory.total']} MiB, driver {gpu['driver_version']}, "
            f"capability {gpu['compute_cap']}",
            _number(gpu["compute_cap"]) >= SMALLEST_CAPABILITY,
        )
        for gpu in found
    ]


def software_findings(*, with_sglang: bool) -> list[Finding]:
    """Versions of torch and SGLang and of what holds their kernels.

    ``with_sglang``: whether SGLang must be there.
    """
    try:
        seen = _versions(sys.executable, COMPUTING) | _versions(sglang_python(), SERVING)
    except ConfigurationError as error:
        return [Finding("software", "versions", error.message, False)]
    release = seen.get("sglang")
    known = release in SGLANG_RELEASES
    rows = [
        Finding(name, "installed", seen.get(name, "missing"), name in seen) for name in COMPUTING
    ]
    rows.append(
        Finding(
            "SGLang",
            " or ".join(SGLANG_RELEASES),
            release or f"missing in {sglang_python()}",
            known if with_sglang or release else None,
        )
    )
    rows += [
        Finding(name, "for SGLang", seen.get(name, "missing"), True if name in seen else None)
        for name in KERNELS
    ]
    return rows


def _versions(python: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Version by name, of those that the interpreter ``python`` has."""
    try:
        done = subprocess.run(
            [python, "-c", _VERSIONS, *packages],
            capture_output=True,
            text=True,
            timeout=VERSIONS_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"{python} tells no versions: {error}") from error
    told: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return {name: str(version) for name, version in told.items()}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
