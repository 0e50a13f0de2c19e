"""What the benchmarks of a live engine share: its options, its start and end, prompts, the machine.

No benchmark itself. An engine is started as a run starts it: the same command line, environment
and process, from a run file that is made up here.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil

from activities.storage.store import Store
from activities.wire.client import EngineClient
from configs.load import resolve_document
from configs.run import RunSpec
from models.ids import RunRef
from workers.actors.engine import server_command
from workers.actors.order import ActorOrder
from workers.engines.process import ServerProcess
from workers.sources.model import PreparedModel, prepare_model

START_TIMEOUT_S = 480.0
"""A first start on a GPU compiles kernels."""
STOP_GRACE_S = 10.0
IDLE_TIMEOUT_S = 60.0
INFO_TIMEOUT_S = 30.0
FIRST_ID = 4
"""The ids below are the special tokens of small models."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every benchmark that starts an engine."""
    parser.add_argument(
        "--model", default="tiny", help="model.source of a run file: a folder, wheel:..., or tiny"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], help="default: cuda where there is one"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: by device")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of an engine on CPU")
    parser.add_argument(
        "--sglang", action="append", default=[], metavar="NAME=VALUE", help="server argument, JSON"
    )
    parser.add_argument("--work", type=Path, help="where models, logs and results go")


def settle(told: argparse.Namespace) -> None:
    """Work out what was left to the machine."""
    if told.device is None:
        told.device = "cuda" if has_gpu() else "cpu"
    told.dtype = told.dtype or ("bfloat16" if told.device == "cuda" else "float32")
    told.work = (told.work or Path(tempfile.mkdtemp(prefix="perdure-benchmark-"))).resolve()
    told.work.mkdir(parents=True, exist_ok=True)


def has_gpu() -> bool:
    """Whether the driver's tool lists a GPU; asks in a process of its own, which CUDA outlives."""
    try:
        seen = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, timeout=INFO_TIMEOUT_S, check=False
        )
    except OSError:
        return False
    return seen.returncode == 0 and bool(seen.stdout.strip())


def run_spec(
    told: argparse.Namespace,
    root: Path,
    *,
    engine: str,
    context: int,
    slots: int,
    sglang: Mapping[str, Any] | None = None,
    **sections: dict[str, Any],
) -> RunSpec:
    """A run whose engine computes ``slots`` requests of ``context`` tokens at once.

    ``sglang``: server arguments of this benchmark; those of the command line stand above them.
    ``sections``: keys of a run file on top of what is made up here.
    """
    asked = (each.partition("=") for each in told.sglang)
    arguments = {**(sglang or {}), **{name: json.loads(value) for name, _, value in asked}}
    document: dict[str, Any] = {
        "schema_version": 1,
        "name": "benchmark",
        "model": {"source": told.model},
        "output": {"root": str(root)},
        "data": {"tasks": [{"task": "reverse_word", "train_count": 8}], "shuffle": False},
        "placement": {"mode": "disaggregated" if told.device == "cuda" else "cpu"},
        "training": {"rollout_batch_size": 1, "samples_per_prompt": 1},
        "core": {"max_context_length": context, "filter_zero_std_groups": False},
        "trainer": {"micro_batch_tokens": max(4096, context)},
        "inference": {
            "engine": engine,
            "dtype": told.dtype,
            "num_threads": told.threads,
            "max_running_requests": slots,
            "server_concurrency": slots,
            "max_response_length": context // 2,
            "start_timeout_s": START_TIMEOUT_S,
        },
    }
    if told.model == "tiny":
        document["model"]["tiny"] = {"warmup_accuracy": 0.0, "max_positions": 2 * context}
    if engine == "sglang":
        document["inference"]["sglang"] = arguments
    for name, keys in sections.items():
        document[name] = {**document.get(name, {}), **keys}
    return resolve_document(document, origin="the benchmark's run").spec


def prepare(spec: RunSpec) -> PreparedModel:
    """The model folder of ``spec``, made or found under its root."""
    return prepare_model(spec, Store(spec.output.root))


def order_of(spec: RunSpec, role: str, scratch: Path, gpu: bool = False) -> ActorOrder:
    """What a server of this benchmark is made for."""
    run = RunRef(run_id="benchmark", root=spec.output.root, spec_sha256="")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    gpus = (visible.split(",")[0],) if gpu and spec.placement.mode != "cpu" else ()
    return ActorOrder(run=run, role=role, scratch=str(scratch), gpus=gpus)


@asynccontextmanager
async def engine_of(
    spec: RunSpec, model: PreparedModel, scratch: Path
) -> AsyncIterator[tuple[ServerProcess, EngineClient]]:
    """An engine that serves ``model`` as version 0, and a client of it; both end with the block.

    When the block fails, the end of the engine's log goes to standard error.
    """
    order = order_of(spec, "engine", scratch, gpu=True)
    command = server_command(order, spec, model.path, 0)
    server = await ServerProcess.start(command, spec.inference.start_timeout_s)
    client = EngineClient(
        server.url,
        vocab_size=model.vocab_size,
        context_length=spec.core.max_context_length,
    )
    try:
        yield server, client
    except BaseException:
        sys.stderr.write(f"the engine's log ends:\n{server.log_tail()}\n")
        raise
    finally:
        await client.aclose()
        await server.stop(STOP_GRACE_S)


async def make_idle(client: EngineClient) -> None:
    """End whatever runs, wait for the end, and forget prefixes."""
    await client.pause("abort")
    await client.resume()
    await client.flush_cache(timeout_s=IDLE_TIMEOUT_S)


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``length`` random ids, no two alike."""
    rng = random.Random(seed)
    return [rng.choices(range(FIRST_ID, vocab_size), k=length) for _ in range(count)]


async def prefilled_tokens(url: str) -> int:
    """Prompt tokens that an SGLang server has computed since its start, by its own counter."""
    async with httpx.AsyncClient(trust_env=False, timeout=INFO_TIMEOUT_S) as http:
        answer = await http.get(f"{url}/metrics")
    return prefill_count(answer.raise_for_status().text)


def prefill_count(text: str) -> int:
    """The counter of computed prompt tokens in a Prometheus text; 0 before the first one."""
    lines = (
        line
        for line in text.splitlines()
        if line.startswith("sglang:realtime_tokens_total{") and 'mode="prefill_compute"' in line
    )
    return round(sum(float(line.rpartition(" ")[2]) for line in lines))


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, user and system, without its children."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def describe_engine(client: EngineClient, engine: str) -> dict[str, Any]:
    """Which engine answers, and the settings that its speed depends on."""
    if engine != "sglang":
        return {"engine": engine}
    info = await client.server_info(timeout_s=INFO_TIMEOUT_S)
    kept = (
        *("version", "attention_backend", "sampling_backend", "dtype", "device"),
        *("disable_radix_cache", "enable_deterministic_inference", "max_total_num_tokens"),
    )
    return {"engine": engine, **{name: info.get(name) for name in kept}}


def describe_machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    names = ("torch", "transformers", "httpx", "pydantic", "pyarrow")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "cpus": len(os.sched_getaffinity(0)),
        "gpu": gpu_name(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def gpu_name() -> str | None:
    """Name and driver of the first GPU."""
    if not has_gpu():
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    seen = subprocess.run(query, capture_output=True, text=True, timeout=INFO_TIMEOUT_S, check=True)
    return seen.stdout.splitlines()[0]


def finish(told: argparse.Namespace, name: str, result: dict[str, Any]) -> None:
    """Write ``result`` to ``WORK/name.json`` with the load at the end, and print it."""
    result["load_average_after"] = os.getloadavg()
    text = json.dumps(result, indent=2)
    path = told.work / f"{name}.json"
    path.write_text(text + "\n")
    print(text)
    print(f"written to {path}")
