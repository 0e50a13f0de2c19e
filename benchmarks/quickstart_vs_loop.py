"""The durable run beside a plain loop, on one machine, one after the other.

    python benchmarks/quickstart_vs_loop.py [RUN.toml] [--set KEY=VALUE ...] [--work FOLDER]

First ``reference_loop.py`` runs alone, then the same run file through Temporal, Ray, an engine
process and a trainer process, on an embedded stack of its own. Both use the same prepared model
and prompts and evaluate as often. Nothing is judged: the measurements are printed and written to
``FOLDER/comparison.json``.

What an update of Perdure and its control plane are is defined in ``activities/analysis/costs.py``.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

from activities.analysis.costs import update_costs
from activities.storage import layout
from activities.storage.store import Store
from configs.load import load_run
from configs.run import RunSpec
from models.metrics import is_mean_reward
from workers.sources.model import prepare_model
from workers.sources.prompts import prepare_data

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "configs" / "recipes" / "quickstart.toml"
LIMIT_S = 3600


def prepare(spec: RunSpec, folder: Path) -> Path:
    """Model and prompts as ``perdure run`` prepares them; returns the ``prepared`` folder."""
    store = Store(folder)
    model = prepare_model(spec, store)
    prepare_data(spec, store, model.path)
    return folder / "prepared"


def run_loop(run_file: str, overrides: list[str], prepared: Path, out: Path) -> dict[str, Any]:
    """Run the reference loop in a process of its own, so that its memory is free afterwards."""
    command = [sys.executable, str(HERE / "reference_loop.py"), run_file]
    command += ["--prepared", str(prepared), "--out", str(out), *_set(overrides)]
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    measured = json.loads(out.read_text())
    updates = measured["updates"]
    return {
        "seconds_per_update": mean(row["seconds"] for row in updates),
        "median_seconds_per_update": median(row["seconds"] for row in updates),
        "rollout_seconds": mean(row["rollout_seconds"] for row in updates),
        "train_seconds": mean(row["train_seconds"] for row in updates),
        "publish_seconds": mean(row["publish_seconds"] for row in updates),
        "total_seconds": measured["total_seconds"],
        "evaluations": [(row["update"], row["reward"]) for row in measured["evaluations"]],
    }


def run_perdure(run_file: str, overrides: list[str], work: Path) -> dict[str, Any]:
    """Run the same file on an embedded stack of its own and read what it left behind."""
    environment = {**os.environ, "PERDURE_STATE_DIR": str(work / "stack")}
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_PROFILE", "RAY_ADDRESS"):
        environment.pop(name, None)
    perdure = [sys.executable, "-m", "workers"]
    started = time.monotonic()
    try:
        subprocess.run(
            [*perdure, "up"], env=environment, check=True, timeout=LIMIT_S,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        stack_seconds = time.monotonic() - started
        started = time.monotonic()
        subprocess.run(
            [*perdure, "run", run_file, "--json", *_set(overrides)],
            env=environment, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        run_seconds = time.monotonic() - started
    finally:
        subprocess.run(
            [*perdure, "down"], env=environment, check=False, timeout=LIMIT_S,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
    measured = read_run(Store(load_run(run_file, overrides).spec.output.root))
    return {**measured, "stack_start_seconds": stack_seconds, "total_seconds": run_seconds}


def read_run(store: Store) -> dict[str, Any]:
    """Per-update costs of a finished run, from its artifacts alone."""
    costs = update_costs(store)
    if costs is None:
        raise SystemExit(f"the run under {store.root} finished no update")
    timings = [row for row in store.read_jsonl(layout.DRIVER_TIMING).rows if row["passed"]]
    metrics = store.read_jsonl(layout.METRICS).rows
    evaluations = {
        int(row["eval/step"]): row[name]
        for row in metrics
        for name in row
        if "eval/step" in row and is_mean_reward(name)
    }
    return {
        **asdict(costs),
        "control_plane_share": costs.control_plane_share,
        "stage_seconds": {
            stage: mean(row["seconds"] for row in timings if row["stage"] == stage)
            for stage in sorted({row["stage"] for row in timings})
        },
        "evaluations": sorted(evaluations.items()),
    }


def describe_machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "ray", "temporalio")},
    }


def _set(overrides: list[str]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def main() -> None:
    """Run both and print them side by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_file", nargs="?", default=str(RECIPE))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--work", type=Path, help="where to leave the runs; default: a new folder")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="perdure-benchmark-"))
    overrides = [*arguments.set, f'output.root="{work}/run"', f'name="benchmark-{os.getpid()}"']
    machine = describe_machine()
    prepared = prepare(load_run(arguments.run_file, overrides).spec, work / "reference")
    loop = run_loop(arguments.run_file, overrides, prepared, work / "loop.json")
    durable = run_perdure(arguments.run_file, overrides, work)
    comparison = {
        "machine": machine,
        "load_average_after": os.getloadavg(),
        "reference_loop": loop,
        "perdure": durable,
        "ratio": durable["seconds_per_update"] / loop["seconds_per_update"],
    }
    (work / "comparison.json").write_text(json.dumps(comparison, indent=2) + "\n")
    print(json.dumps(comparison, indent=2))
    for name in ("seconds_per_update", "rollout_seconds", "train_seconds", "publish_seconds"):
        print(f"{name:<22} loop {loop[name]:8.3f}   perdure {durable[name]:8.3f}")
    print(f"{'ratio':<22} {comparison['ratio']:.3f}")
    share = durable["control_plane_share"]
    print(f"{'control plane':<22} {'overlapped' if share is None else f'{share:.1%} of an update'}")


if __name__ == "__main__":
    main()
