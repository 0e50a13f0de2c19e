"""A real SGLang server for the contract tests, started from an environment of its own.

``PERDURE_SGLANG_PYTHON`` names an interpreter that has SGLang; otherwise ``.venv-sglang``, which
``scripts/setup-sglang-cpu`` makes, is looked for. Where torch of that interpreter sees a GPU, the
server uses it.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 240.0
"""A first start on a GPU compiles kernels for over a minute."""
STOP_DEADLINE_S = 20.0
PROBE_DEADLINE_S = 60.0
LOG_LINES = 30
ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    "--disable-cuda-graph",
)
ON_GPU = (
    *("--attention-backend", "triton", "--dtype", "bfloat16", "--mem-fraction-static", "0.2"),
    *("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"),
    "--enable-deterministic-inference",
)
LIMITS = (
    *("--max-running-requests", "4", "--max-queued-requests", "4"),
    *("--max-total-tokens", "20000", "--sampling-backend", "pytorch"),
    *("--skip-server-warmup", "--enable-return-routed-experts", "--enable-metrics"),
)


def sglang_python() -> str | None:
    """The interpreter that has SGLang, None when there is none."""
    named = os.environ.get("PERDURE_SGLANG_PYTHON")
    if named:
        return named
    made = ROOT / ".venv-sglang" / "bin" / "python"
    return str(made) if made.exists() else None


@cache
def sees_gpu(python: str) -> bool:
    """Whether torch of that interpreter has a GPU."""
    script = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    done = subprocess.run(
        [python, "-c", script], capture_output=True, timeout=PROBE_DEADLINE_S, check=False
    )
    return done.returncode == 0


@dataclass(frozen=True, slots=True)
class SglangServer:
    """A server that answers."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path


@contextmanager
def sglang_server(
    model: Path, log: Path, *extra: str, **environment: str
) -> Iterator[SglangServer]:
    """Serve ``model`` until the block ends; its process group is killed then."""
    python = sglang_python()
    assert python is not None, "no interpreter has SGLang"
    on_gpu = sees_gpu(python)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *LIMITS]
    command += [*(ON_GPU if on_gpu else ON_CPU), *extra]
    told = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    told |= {"SGLANG_TIMEOUT_KEEP_ALIVE": "60"} | ({} if on_gpu else {"SGLANG_USE_CPU_ENGINE": "1"})
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=os.environ | told | environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url, log)
        yield SglangServer(url, process, log)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_DEADLINE_S)


def _wait_until_healthy(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    with httpx.Client(base_url=url, trust_env=False, timeout=5) as client:
        while time.monotonic() < deadline:
            assert process.poll() is None, f"SGLang ended at its start:\n{_tail(log)}"
            try:
                if client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
    raise AssertionError(f"SGLang is not ready after {START_DEADLINE_S:g} s:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
