"""A real SGLang engine for the contract tests, started as a run starts one.

``PERDURE_SGLANG_PYTHON`` names an interpreter that has SGLang; otherwise ``.venv-sglang``, which
``scripts/setup-sglang-cpu`` makes, is looked for. Where torch of that interpreter sees a GPU, the
server uses it.
"""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from configs.inference import Argument
from configs.load import resolve_document
from configs.run import RunSpec
from workers.engines.sglang.arguments import server_arguments, server_environment
from workers.engines.sglang.installed import PYTHON_VARIABLE

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "recipes" / "tiny.toml"
START_DEADLINE_S = 240.0
"""A first start on a GPU compiles kernels for over a minute."""
STOP_DEADLINE_S = 20.0
PROBE_DEADLINE_S = 60.0
LOG_LINES = 30
CONTEXT_LENGTH = 4090
"""Of a run. The server keeps six more positions, which makes the 4096 of the model."""
NO_SGLANG = "no SGLang: scripts/setup-sglang-cpu makes .venv-sglang, or set PERDURE_SGLANG_PYTHON"
MAX_QUEUED = 8
"""As many as a test sends at once: all count as queued when they arrive."""
SERVER = {"enable_metrics": True, "skip_server_warmup": True}
ON_CPU = {"max_total_tokens": 20_000}
ON_GPU = {
    "attention_backend": "triton",
    "mem_fraction_static": 0.2,
    "disable_prefill_cuda_graph": True,
}


def sglang_python() -> str | None:
    """The interpreter that has SGLang, None when there is none."""
    named = os.environ.get(PYTHON_VARIABLE)
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


def run_file(on_gpu: bool, mode: str = "disaggregated") -> RunSpec:
    """A run whose engines compute four requests and hold eight more; ``mode``: on a GPU.

    Its engines hand tokens over as those of a ``refresh`` do, which needs the most of the contract.
    """
    document = tomllib.loads(RECIPE.read_text())
    document["placement"] = {"mode": mode if on_gpu else "cpu"}
    document["inference"] |= {
        "engine": "sglang",
        "dtype": "bfloat16" if on_gpu else "float32",
        "deterministic": on_gpu,
        "server_concurrency": MAX_QUEUED,
        "max_running_requests": 4,
        "max_queued_requests": MAX_QUEUED,
        "sglang": SERVER | (ON_GPU if on_gpu else ON_CPU),
    }
    document["output"]["root"] = "/nowhere"
    spec = resolve_document(document, origin=RECIPE.name).spec
    limits = {"max_context_length": CONTEXT_LENGTH, "publication_mode": "refresh"}
    core = spec.core.model_copy(update=limits)
    return spec.model_copy(update={"core": core})


@contextmanager
def sglang_server(
    model: Path,
    root: Path,
    mode: str = "disaggregated",
    more: Mapping[str, Argument] = MappingProxyType({}),
    **environment: str,
) -> Iterator[str]:
    """Serve ``model`` and give the URL; the server has ended when the block has.

    ``more``: server arguments above those of the run file.
    """
    python = sglang_python()
    assert python is not None, "no interpreter has SGLang"
    spec = run_file(sees_gpu(python), mode)
    config: dict[str, Any] = json.loads((model / "config.json").read_bytes())
    arguments = server_arguments(spec, model, config, with_routes=True) | more
    ready, log = root / "engine.json", root / "engine.log"
    command = [sys.executable, "-m", "workers.engines.sglang", "--exit-with-parent"]
    command += ["--arguments", json.dumps(arguments), "--ready-file", str(ready)]
    told = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", PYTHON_VARIABLE: python}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | server_environment(spec) | told | environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _url_when_ready(process, ready, log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_DEADLINE_S)


def _url_when_ready(process: "subprocess.Popen[bytes]", ready: Path, log: Path) -> str:
    deadline = time.monotonic() + START_DEADLINE_S
    while not ready.exists():
        assert process.poll() is None, f"SGLang ended at its start:\n{_tail(log)}"
        assert time.monotonic() < deadline, f"SGLang is not ready:\n{_tail(log)}"
        time.sleep(0.05)
    return str(json.loads(ready.read_text())["url"])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
