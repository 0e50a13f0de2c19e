"""What sampling beside training is worth: a fully async run against the sequential run.

    python benchmarks/async_overlap.py [--updates 50] [--groups 8] [--work FOLDER]

Both go through the whole stack (Temporal, Ray, an engine process, the trainer) with one model,
one batch shape and the same engine. On a small machine a small model samples faster than it
trains, so every decode step of the engine is lengthened without work
(``PERDURE_ENGINE_STEP_DELAY_MS``) until a collection takes as long as its update. The model is
random and guesses digits: rewards differ within a group, so every update has a gradient, and
answers are of the same lengths in all runs.

1. a short sequential run at full speed measures R0 (sampling), T (optimizer) and the decode steps
   of a collection; the delay is (T - R0) / steps;
2. the sequential run with that delay measures R, T and its wall time an update, about R + T;
3. the fully async run (refresh publication) measures its wall time an update: max(R, T) and the
   hand-over.

Wall time an update is the time between the first and the last publication that count, over the
updates between them; the first ``WARM_UP`` updates do not count. Nothing is judged: the figures are
printed and written to ``FOLDER/overlap.json``.
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
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

from activities.storage import layout
from activities.storage.store import Store

LIMIT_S = 3600
WARM_UP = 3
"""Updates whose time does not count: first products are slower, an async queue starts empty."""
PROBE_UPDATES = 5

SAMPLES = 8
"""Siblings of a prompt."""
TOKENS = 24
"""New tokens of a response at most; a random model rarely ends earlier."""
PROMPT_CHARACTERS = 200
"""A character is a token. The trainer computes a prompt for each of its samples (documents), an
engine once a group: training is much more work than sampling, as it is on machines of their own."""

RUN_FILE = """
schema_version = 1
name = "{name}"
[model]
{model}
[output]
root = "{root}"
[data]
prompt_data = "{prompts}"
verifier = "number"
[training]
num_rollouts = {updates}
rollout_batch_size = {groups}
samples_per_prompt = {samples}
loss_aggregation = "token"
entropy_coef = 1e-9                 # every sample goes through the model, so that T stays the same
save_checkpoints = false
[optimizer]
learning_rate = 1e-7                # the model stays random
[core]
max_context_length = 256
filter_zero_std_groups = false
{core}
[trainer]
packing = "documents"
compute_dtype = "float32"
num_threads = 1
[inference]
dtype = "float32"
num_engines = 1
num_threads = 1
max_response_length = {tokens}
max_running_requests = {slots}
server_concurrency = {slots}
[evaluation]
initial = false
final = false
[launch.env]
PERDURE_ENGINE_STEP_DELAY_MS = "{delay_ms:.3f}"
{tables}
"""
TINY = """
source = "tiny"
[model.tiny]
hidden_size = 256
num_layers = 4
num_heads = 4
num_kv_heads = 2
warmup_accuracy = 0.0
"""
ASYNC_CORE = """
publication_mode = "refresh"
max_policy_lag = 4
"""
ASYNC_TABLE = """
[async]
fully_async = true
async_data_buffer_capacity_factor = 1.0
"""


class Bench:
    """One stack, several runs of one model on one set of prompts."""

    def __init__(self, work: Path, groups: int) -> None:
        self.work = work
        self.groups = groups
        self._prompts = work / "prompts.jsonl"
        self._env = {**os.environ, "PERDURE_STATE_DIR": str(work / "stack")}
        for name in ("TEMPORAL_ADDRESS", "TEMPORAL_PROFILE", "RAY_ADDRESS"):
            self._env.pop(name, None)

    def prepare(self) -> None:
        """Write the prompts."""
        digits = random.Random(17)
        rows = [
            {
                "prompt": f"guess {number:05d}=".rjust(PROMPT_CHARACTERS, "."),
                "answer": str(digits.randrange(10)),
            }
            for number in range(4096)
        ]
        self._prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    @contextmanager
    def stack(self) -> Iterator[None]:
        """An embedded stack of its own."""
        try:
            self._perdure("up")
            yield
        finally:
            self._perdure("down", check=False)

    def run(self, name: str, updates: int, delay_ms: float, *, fully_async: bool) -> dict[str, Any]:
        """One run from start to end, and what its artifacts say."""
        root = self.work / name
        samples = self.groups * SAMPLES
        text = RUN_FILE.format(
            name=f"overlap-{name}-{os.getpid()}",
            model=TINY,
            root=root,
            prompts=self._prompts,
            updates=updates,
            groups=self.groups,
            samples=SAMPLES,
            tokens=TOKENS,
            slots=samples,
            delay_ms=delay_ms,
            core=ASYNC_CORE if fully_async else "",
            tables=ASYNC_TABLE if fully_async else "",
        )
        before = os.getloadavg()
        self._perdure("run", str(self._write(name, text)), "--json")
        return {**read_run(Store(root)), "load_average": [before, os.getloadavg()]}

    def _write(self, name: str, text: str) -> Path:
        path = self.work / f"{name}.toml"
        path.write_text(text)
        return path

    def _perdure(self, *arguments: str, check: bool = True) -> None:
        command = [sys.executable, "-m", "workers", *arguments]
        subprocess.run(
            command, env=self._env, check=check, timeout=LIMIT_S, stdout=subprocess.DEVNULL
        )


def read_run(store: Store) -> dict[str, Any]:
    """Seconds an update and its parts, means over the updates that count."""
    timings = [row for row in store.read_jsonl(layout.DRIVER_TIMING).rows if row["passed"]]
    metrics = store.read_jsonl(layout.METRICS).rows
    published = {
        int(row["rollout_id"]): row["started_unix"] + row["seconds"]
        for row in timings
        if row["stage"] == "publication" and row["rollout_id"] is not None
    }
    last = max(published)

    def stage(name: str) -> float:
        return mean(
            row["seconds"]
            for row in timings
            if row["stage"] == name and (row["rollout_id"] or 0) >= WARM_UP
        )

    def metric(kind: str, name: str) -> float:
        return mean(
            row[name] for row in metrics if row.get("kind") == kind and row["update"] >= WARM_UP
        )

    return {
        "updates": last - WARM_UP + 1,
        "seconds_per_update": (published[last] - published[WARM_UP - 1]) / (last - WARM_UP + 1),
        "rollout_seconds": metric("rollout", "rollout/seconds"),
        "train_seconds": metric("train", "train/step_seconds"),
        "train_cpu_seconds": metric("train", "train/cpu_seconds"),
        "lag": metric("train", "train/lag"),
        "decode_steps": metric("rollout", "rollout/response_len/max"),
        "response_tokens": metric("rollout", "rollout/response_len/mean"),
        "stage_seconds": {
            name: stage(name) for name in ("generation_wait", "training", "publication")
        },
    }


def describe_machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "ray", "temporalio")},
    }


def measure(bench: Bench, updates: int, sync_updates: int) -> dict[str, Any]:
    """The three runs and their ratios."""
    with bench.stack():
        probe = bench.run("probe", PROBE_UPDATES + WARM_UP, 0.0, fully_async=False)
        gap = probe["train_seconds"] - probe["rollout_seconds"]
        delay_ms = max(0.0, 1000 * gap / probe["decode_steps"])
        sync = bench.run("sync", sync_updates + WARM_UP, delay_ms, fully_async=False)
        overlapped = bench.run("async", updates + WARM_UP, delay_ms, fully_async=True)
    rollout, train = sync["rollout_seconds"], sync["train_seconds"]
    return {
        "step_delay_ms": delay_ms,
        "probe": probe,
        "sync": sync,
        "async": overlapped,
        "R": rollout,
        "T": train,
        "async_over_max": overlapped["seconds_per_update"] / max(rollout, train),
        "sync_over_sum": sync["seconds_per_update"] / (rollout + train),
        "async_over_sync": overlapped["seconds_per_update"] / sync["seconds_per_update"],
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=50, help="async updates that count")
    parser.add_argument("--sync-updates", type=int, default=15, help="sequential ones that count")
    parser.add_argument("--groups", type=int, default=8, help="prompt groups of eight an update")
    parser.add_argument("--work", type=Path, help="where to leave the runs; default: a new folder")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="perdure-overlap-"))
    work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    bench = Bench(work.resolve(), arguments.groups)
    bench.prepare()
    machine = describe_machine()
    result = {"machine": machine, **measure(bench, arguments.updates, arguments.sync_updates)}
    result["total_seconds"] = time.monotonic() - started
    (work / "overlap.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    print(f"R {result['R']:.3f} s   T {result['T']:.3f} s   delay {result['step_delay_ms']:.1f} ms")
    for name, base in (("async", "max(R, T)"), ("sync", "R + T")):
        ratio = result["async_over_max" if name == "async" else "sync_over_sum"]
        seconds = result[name]["seconds_per_update"]
        print(f"{name:<5} {seconds:.3f} s an update, {ratio:.3f} x {base}")


if __name__ == "__main__":
    main()
