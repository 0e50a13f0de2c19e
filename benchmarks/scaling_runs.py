"""Whole runs on N GPUs of one host: publication, sampling beside training, kills, in turns.

    python benchmarks/scaling_runs.py publication --gpus 4 --work FOLDER --out publication.json
    python benchmarks/scaling_runs.py async ...        30 updates; the run goes on afterwards
    python benchmarks/scaling_runs.py kill ...         kills in that run, or in one of its own
    python benchmarks/scaling_runs.py colocated ...    trainer and engines on all GPUs, in turns

On GPUs half of them train and half sample, a random Qwen3-0.6B (``qwen3-0.6b-random.toml``) on
SGLang engines; with ``--cpu`` N trainer processes and N native engines, the model of
``tiny-ci.toml``. All runs have the same collection, which grows with the number of engines. The
model is prepared by the first run and read by the others.

- ``publication``: runs of fewer engines, 1, 2, 4, with the same trainer; the async run has the
  rest. Of each publication after the first two: seconds without the folder that is written when
  engines sample again, bytes, and what every engine confirmed.
- ``async``, ``colocated``: seconds an update (``async_overlap.py`` says how they are taken),
  medians by stage, idle share of every GPU as NVML tells it, of trainer and engines by the stages.
  And what ``perdure plan`` lays out for either.
- ``kill``: SIGKILL of the first engine, then of a trainer rank; seconds to the next finished update
  and to the replacement, then the run is stopped and its prompts are accounted for.

The stack of the environment (``PERDURE_STATE_DIR``) is used and stays up.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from async_overlap import WARM_UP, read_run
from live_engine import describe_machine
from scaling_records import (
    engines_empty,
    gpu_idle,
    num_updates,
    process_of,
    publication_row,
    stage_medians,
    state_of,
)

from activities.analysis.audit import audit
from activities.analysis.lives import Fate
from activities.storage import layout
from activities.storage.store import Store
from configs.load import load_run
from configs.plan import build_plan

RECIPES = Path(__file__).resolve().parents[1] / "configs" / "recipes"
SIBLINGS = 8
MEASURED = 30
COLOCATED_UPDATES = 12
PUBLISHING_UPDATES = 6
ENDLESS = 2000
"""Updates of the run that is killed in; it is stopped long before."""
POLL_S = 0.1
RANK_MODULE = "workers.trainers.rank_process"
COMMAND_S = 120.0


class Bench:
    """One host, one model, several runs."""

    def __init__(self, told: argparse.Namespace) -> None:
        self.cpu: bool = told.cpu
        self.gpus: int = told.gpus
        self.work: Path = told.work
        self.deadline = time.monotonic() + told.budget_s
        self.trainers = told.gpus if told.cpu else told.gpus // 2
        self.engines = told.gpus if told.cpu else told.gpus // 2

    def root(self, kind: str) -> Path:
        """Output root of the run of this kind."""
        return self.work / kind

    def document(self, kind: str, engines: int, updates: int) -> dict[str, Any]:
        """The run file of the kind: ``publication-E``, ``async`` or ``colocated``."""
        recipe = "tiny-ci" if self.cpu else "qwen3-0.6b-random"
        document = tomllib.loads((RECIPES / f"{recipe}.toml").read_text())
        colocated = kind == "colocated"
        prepared = self._prepared_model()
        if prepared is not None:
            document["model"] = {"source": str(prepared)}
        sections: dict[str, dict[str, Any]] = {
            "output": {"root": str(self.root(kind))},
            "placement": {"mode": self._placement(colocated)},
            "training": {
                "num_rollouts": updates,
                "rollout_batch_size": 8 * self.engines,
                "samples_per_prompt": SIBLINGS,
                "save_interval": MEASURED,
            },
            "core": {
                "max_policy_lag": 0 if colocated else 3,
                "publication_mode": "barrier" if colocated else "refresh",
            },
            "trainer": {"num_processes": self.gpus if colocated else self.trainers},
            "inference": {"num_engines": engines},
            "evaluation": {"initial": False, "final": False},
        }
        if not self.cpu:
            sections["core"]["max_context_length"] = 512
            sections["trainer"]["micro_batch_tokens"] = 32768
            sections["inference"]["max_response_length"] = 256
        if self.cpu:
            document["training"].pop("global_batch_size")
            sections["optimizer"] = {"learning_rate": 2e-4}
        if not colocated:
            sections["async"] = {"fully_async": True}
            sections["core"]["pipeline_observation_interval_s"] = 1.0
        for name, keys in sections.items():
            document[name] = {**document.get(name, {}), **keys}
        return {**document, "name": f"scale-{kind}-{self._series()}"}

    def start(self, kind: str, engines: int, updates: int) -> str:
        """Start the run and leave; its name."""
        document = self.document(kind, engines, updates)
        file = self.work / f"{kind}.json"
        file.write_text(json.dumps(document, indent=2))
        self.perdure("start", str(file))
        return str(document["name"])

    def name(self, kind: str) -> str:
        """Name of a run that was started, maybe by another command."""
        return str(json.loads((self.work / f"{kind}.json").read_text())["name"])

    def perdure(self, *arguments: str, check: bool = True) -> None:
        """One command, with as much time as is left."""
        subprocess.run(
            [sys.executable, "-m", "workers", *arguments],
            check=check,
            timeout=max(1.0, self.deadline - time.monotonic()),
            stdout=subprocess.DEVNULL,
        )

    def wait_for(self, what: str, condition: Callable[[], bool], root: Path) -> float:
        """Seconds until ``condition``; ends the command when the run fails or no time is left."""
        started = time.monotonic()
        while not condition():
            if state_of(root) == "failed":
                why = (root / layout.WORKFLOW_JSON).read_text()[-1500:]
                raise SystemExit(f"{root.name} failed before {what}:\n{why}")
            if time.monotonic() > self.deadline:
                raise SystemExit(
                    f"{root.name}: no time left to wait for {what} after "
                    f"{time.monotonic() - started:.0f} s, {num_updates(root)} updates are done"
                )
            time.sleep(POLL_S)
        return time.monotonic() - started

    def _placement(self, colocated: bool) -> str:
        if colocated:
            return "colocated"
        return "cpu" if self.cpu else "disaggregated"

    def _prepared_model(self) -> Path | None:
        """The folder of a run that is past its preparation."""
        for report in sorted(self.work.glob(f"*/{layout.PREPARED_REPORT}")):
            return report.parents[1] / layout.PREPARED_MODEL
        return None

    def _series(self) -> str:
        """The same for all commands on one folder; no earlier folder's runs have it."""
        file = self.work / "series"
        if not file.exists():
            file.write_text(f"{os.getpid()}-{int(time.time())}")
        return file.read_text()


def publication(bench: Bench) -> dict[str, Any]:
    """A row for each number of engines below that of the async run."""
    rows = []
    for engines in (1, 2, 4):
        if engines < bench.engines:
            kind = f"publication-{engines}"
            name = bench.start(kind, engines, PUBLISHING_UPDATES)
            bench.perdure("wait", name)
            rows.append(publication_row(Store(bench.root(kind)), bench.trainers))
    return {"rows": rows}


def run_async(bench: Bench) -> dict[str, Any]:
    """30 updates after those that warm up; the run is left alone then."""
    root = bench.root("async")
    with gpu_samples(bench, "async"):
        bench.start("async", bench.engines, ENDLESS)
        done = WARM_UP + MEASURED
        bench.wait_for(f"{done} updates", lambda: num_updates(root) > done, root)
    row = run_row(bench, "async", engines=bench.engines)
    return {"rows": [row], "publication": [publication_row(Store(root), bench.trainers)]}


def run_colocated(bench: Bench) -> dict[str, Any]:
    """The same collections, sampled and trained in turns on all GPUs."""
    with gpu_samples(bench, "colocated"):
        name = bench.start("colocated", bench.gpus, WARM_UP + COLOCATED_UPDATES)
        bench.perdure("wait", name)
    return {"rows": [run_row(bench, "colocated", engines=bench.gpus)]}


def run_row(bench: Bench, kind: str, *, engines: int) -> dict[str, Any]:
    """Seconds an update, medians by stage, idle shares, what the planner says."""
    store = Store(bench.root(kind))
    read = read_run(store)
    cycle = read["seconds_per_update"]
    sampling = read["rollout_seconds"] if kind == "colocated" else None
    return {
        "kind": kind,
        "trainers": bench.gpus if kind == "colocated" else bench.trainers,
        "engines": engines,
        "samples": 8 * bench.engines * SIBLINGS,
        "response_tokens": read["response_tokens"],
        "updates": read["updates"],
        "seconds_per_update": cycle,
        "stages": stage_medians(store),
        "lag": read["lag"],
        "trainer_idle": 1 - read["stage_seconds"]["training"] / cycle,
        "engine_idle": None if sampling is None else 1 - sampling / cycle,
        "engines_empty": engines_empty(store),
        "gpu_idle": gpu_idle(store, Store(bench.work), gpu_usage(kind)),
        "plan": planned(bench.work / f"{kind}.json"),
    }


def gpu_usage(kind: str) -> str:
    """File of samples beside the root, which belongs to the run."""
    return f"gpu_usage_{kind}.jsonl"


@contextmanager
def gpu_samples(bench: Bench, kind: str) -> Iterator[None]:
    """NVML is asked once a second while the block runs."""
    if bench.cpu:
        yield
        return
    command = [sys.executable, "-m", "workers", "gpu-usage", str(bench.work / gpu_usage(kind))]
    with subprocess.Popen([*command, "--interval", "1"], stdout=subprocess.DEVNULL) as sampler:
        try:
            yield
        finally:
            sampler.terminate()


def planned(file: Path) -> dict[str, Any]:
    """What ``perdure plan`` says of a run file: where it goes, what a GPU holds, warnings."""
    plan = build_plan(load_run(str(file), ()))
    allocation = plan["allocation"]
    return {
        "gpus": allocation["gpus"] and allocation["gpus"]["summary"],
        "gpu_memory": allocation["gpu_memory"],
        "warnings": [warning["code"] for warning in plan["warnings"]],
    }


def kill(bench: Bench) -> dict[str, Any]:
    """Kill an engine and a trainer rank in the middle of a run."""
    root = bench.root("async")
    if state_of(root) != "training":
        bench.start("async", bench.engines, ENDLESS)
    bench.wait_for("updates", lambda: num_updates(root) > WARM_UP, root)
    rows = [kill_engine(bench, root), kill_rank(bench, root)]
    settled = num_updates(root) + 2
    bench.wait_for("two more updates", lambda: num_updates(root) >= settled, root)
    name = bench.name("async")
    bench.perdure("stop", name, "--reason", "measured")
    bench.perdure("wait", name, check=False)
    books = audit(str(root))
    return {
        "rows": rows,
        "audit": {
            "missing": books.count(Fate.MISSING),
            "doubled": books.prompts_doubled + books.updates_doubled,
            "updates": books.updates,
            "updates_redone": books.updates_redone,
            "verdict": books.verdict,
        },
    }


def kill_engine(bench: Bench, root: Path) -> dict[str, Any]:
    """SIGKILL of the first engine's server."""
    killed = process_of(root, "engine")
    before = num_updates(root)
    os.kill(killed["pid"], signal.SIGKILL)
    update_s = bench.wait_for("an update", lambda: num_updates(root) > before, root)

    def is_replaced() -> bool:
        engine = process_of(root, "engine")
        return bool(engine["incarnation"] > killed["incarnation"] and engine["url"])

    replaced_s = update_s + bench.wait_for("another engine", is_replaced, root)
    settled = num_updates(root) + 2
    bench.wait_for("two updates with it", lambda: num_updates(root) >= settled, root)
    return {
        "killed": "engine 0",
        "updates_before": before,
        "seconds_to_update": update_s,
        "seconds_to_replacement": replaced_s,
    }


def kill_rank(bench: Bench, root: Path) -> dict[str, Any]:
    """SIGKILL of a trainer rank: the last one, which is a child of the trainer's actor."""
    trainer = process_of(root, "trainer")
    ranks = [
        child
        for child in psutil.Process(trainer["pid"]).children(recursive=True)
        if RANK_MODULE in " ".join(child.cmdline())
    ]
    before = num_updates(root)
    os.kill(ranks[-1].pid if ranks else trainer["pid"], signal.SIGKILL)
    update_s = bench.wait_for("an update", lambda: num_updates(root) > before, root)
    again = process_of(root, "trainer")
    return {
        "killed": f"trainer rank {len(ranks)}" if ranks else "trainer (one rank)",
        "updates_before": before,
        "seconds_to_update": update_s,
        "seconds_to_replacement": None,
        "replaced": again["incarnation"] > trainer["incarnation"],
    }


PARTS = {
    "publication": publication,
    "async": run_async,
    "kill": kill,
    "colocated": run_colocated,
}


def main() -> None:
    """Do one part and write what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--gpus", type=int, required=True, help="of this host; see above for CPUs")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--work", type=Path, required=True, help="run files and roots")
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    told.work = told.work.resolve()
    told.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(told)
    result = PARTS[told.part](bench)
    machine = {**describe_machine(), **versions()}
    told.out.write_text(json.dumps({"machine": machine, "cpu": told.cpu, **result}, indent=2))
    print(json.dumps(result))


def versions() -> dict[str, str]:
    """Of what runs whole runs, where it is installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("ray", "temporalio", "sglang"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
