"""Command line of the native engine. Imports no torch, so that a usage error is instant.

One environment variable is read: ``PERDURE_ENGINE_STEP_DELAY_MS``, milliseconds (default 0) by
which every decode step is lengthened without using the processor. It changes no token. Benchmarks
set it (in ``[launch.env]``) to stand for a model that takes longer than the one at hand.
"""

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.inference import InferenceSection
from models.errors import ConfigurationError
from workers.engines.arguments import positive_int, positive_seconds

STEP_DELAY_VARIABLE = "PERDURE_ENGINE_STEP_DELAY_MS"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything that the process is told at start."""

    model_path: Path
    host: str
    port: int
    ready_file: Path | None
    dtype: str
    num_threads: int
    max_running_requests: int
    max_queued_requests: int
    context_length: int | None
    kv_budget_mib: int
    deterministic: bool
    return_routed_experts: bool
    weight_version: str
    req_waiting_timeout_s: float | None
    req_running_timeout_s: float | None
    shutdown_timeout_s: float
    exit_with_parent: bool
    step_delay_s: float = 0.0


def build_parser() -> argparse.ArgumentParser:
    """The argument parser; names follow SGLang's where both have the option."""
    parser = argparse.ArgumentParser(prog="python -m workers.engines.native")
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="HF folder: config.json + *.safetensors")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0 picks a free port; read it from the ready file")
    add("--ready-file", type=Path, help="JSON {port, pid, url}, written when serving")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--num-threads", type=positive_int, default=1, help="torch threads of matrix products")
    add("--max-running-requests", type=positive_int, default=64)
    add("--max-queued-requests", type=positive_int, default=4096)
    add("--context-length", type=positive_int, help="tokens; default: the model's own limit")
    add(
        "--kv-budget-mib",
        type=positive_int,
        default=InferenceSection().kv_cache_mib,
        help="KV cache at most",
    )
    add("--deterministic", action="store_true", help="one fixed batch shape for every step")
    add("--enable-return-routed-experts", dest="return_routed_experts", action="store_true")
    add("--weight-version", default="default")
    add("--req-waiting-timeout", dest="req_waiting_timeout_s", type=positive_seconds)
    add("--req-running-timeout", dest="req_running_timeout_s", type=positive_seconds)
    add("--shutdown-timeout", dest="shutdown_timeout_s", type=positive_seconds, default=5.0)
    add("--exit-with-parent", action="store_true", help="stop when the parent process ends")
    return parser


def parse_options(arguments: list[str]) -> EngineOptions:
    """Parse the command line. Exits with status 2 on a usage error, as argparse does.

    Raises:
        ConfigurationError: the environment asks for a step delay that is none.
    """
    given = vars(build_parser().parse_args(arguments))
    return EngineOptions(**given, step_delay_s=step_delay_s(os.environ))


def step_delay_s(environment: Mapping[str, str]) -> float:
    """Seconds by which each decode step is lengthened.

    Raises:
        ConfigurationError: not a finite number of at least 0 milliseconds.
    """
    text = environment.get(STEP_DELAY_VARIABLE, "0")
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 <= milliseconds < math.inf:
        raise ConfigurationError(
            f"{STEP_DELAY_VARIABLE}={text!r} is no number of milliseconds of at least 0; unset it "
            "for an engine at full speed"
        )
    return milliseconds / 1000
