"""One run file through Perdure and through TRL's GRPOTrainer, one after the other on one machine.

    python benchmarks/trl_comparison.py configs/recipes/gpu-smollm2-gym.toml --updates 20 \
        --generation generate continuous
    python benchmarks/trl_comparison.py configs/recipes/tiny.toml --updates 12

First the whole stack (Temporal, Ray, engine, trainer) on an embedded stack of its own, then
``trl_grpo.py`` from the model folder and the prompts that this run prepared, once for each kind of
``--generation``. What is equal and what TRL is set to is said there. A vLLM server, TRL's advice
for speed, is not part of it: it pins another torch than the one that runs here.

No update is followed by an evaluation or, but for Perdure's last, by a checkpoint. Seconds of an
update are wall time from one update's end to the next one's; the first ``--skip`` do not count. The
split of Perdure is sampling with scoring, training, publication, and what remains; that of TRL is
sampling, rewards, and what remains, which is training. The reward of every update is in the result,
so that the curves can be compared; the order of prompts and the random numbers differ.

``PERDURE_TRL_PYTHON`` names another interpreter for TRL's side; it needs Perdure's packages too.
Nothing is judged: figures are printed and written to ``WORK/trl_comparison.json``.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

from quickstart_vs_loop import run_perdure

from activities.storage import layout
from activities.storage.store import Store
from configs.load import load_run

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "configs" / "recipes" / "gpu-smollm2-gym.toml"
PYTHON_VARIABLE = "PERDURE_TRL_PYTHON"
LIMIT_S = 3600
NEVER = 1_000_000
STAGES = {"generation_wait": "rollout", "training": "train", "publication": "publish"}


def overrides_of(told: argparse.Namespace) -> list[str]:
    """The run file's keys as both sides read them."""
    return [
        *told.set,
        f'output.root="{told.work}/run"',
        f'name="trl-comparison-{os.getpid()}"',
        f"training.num_rollouts={told.updates}",
        f"training.save_interval={NEVER}",
        "output.export_hf=false",
        "evaluation.initial=false",
        "evaluation.final=false",
        f"evaluation.interval={NEVER}",
    ]


def perdure_updates(store: Store) -> list[dict[str, float]]:
    """A row for each update but the first, whose beginning has no former update's end."""
    timings = [row for row in store.read_jsonl(layout.DRIVER_TIMING).rows if row["passed"]]
    metrics = store.read_jsonl(layout.METRICS).rows
    stages: dict[int, dict[str, float]] = {}
    ends: dict[int, float] = {}
    for row in timings:
        update = row["rollout_id"]
        if update is None or row["stage"] not in STAGES:
            continue
        stages.setdefault(update, {})[f"{STAGES[row['stage']]}_seconds"] = row["seconds"]
        ends[update] = max(ends.get(update, 0.0), row["started_unix"] + row["seconds"])
    rewards = {row["update"]: row["rollout/reward"] for row in metrics if "rollout/reward" in row}
    return [
        {"seconds": ends[after] - ends[before], **stages[after], "reward": rewards[after]}
        for before, after in itertools.pairwise(sorted(ends))
    ]


def run_trl(told: argparse.Namespace, generation: str) -> dict[str, Any]:
    """TRL's side in a process of its own."""
    out = told.work / f"trl-{generation}.json"
    command = [os.environ.get(PYTHON_VARIABLE) or sys.executable, str(HERE / "trl_grpo.py")]
    command += [told.run_file, "--prepared", str(told.work / "run" / "prepared")]
    command += ["--generation", generation, "--micro-batch", str(told.micro_batch)]
    command += [part for key in overrides_of(told) for part in ("--set", key)]
    if told.threads:
        command += ["--threads", str(told.threads)]
    log = out.with_suffix(".log")
    with log.open("wb") as output:
        done = subprocess.run(
            [*command, "--out", str(out)],
            stdout=output,
            stderr=output,
            timeout=LIMIT_S,
            check=False,
        )
    if done.returncode:
        end = log.read_text(errors="replace")[-1500:]
        return {"generation": generation, "error": f"ended with {done.returncode}: {end}"}
    found: dict[str, Any] = json.loads(out.read_text())
    return found | summary(found["updates"][told.skip :])


def summary(updates: list[dict[str, float]]) -> dict[str, float]:
    """Median seconds of the updates that count and of their parts; mean reward of the last five."""
    if not updates:
        raise SystemExit("no update is left to count: raise --updates or lower --skip")
    parts = [name for name in updates[0] if name.endswith("_seconds")]
    return {
        "seconds": median(row["seconds"] for row in updates),
        "mean_seconds": mean(row["seconds"] for row in updates),
        **{name: median(row[name] for row in updates) for name in parts},
        "other_seconds": median(
            row["seconds"] - sum(row[name] for name in parts) for row in updates
        ),
        "last_reward": mean(row["reward"] for row in updates[-5:]),
    }


def describe_machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    names = ("torch", "transformers", "ray", "temporalio")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def compare(told: argparse.Namespace) -> dict[str, Any]:
    """Both sides; the ratio is to the fastest kind of generation that ran."""
    machine, overrides = describe_machine(), overrides_of(told)
    spec = load_run(told.run_file, overrides).spec
    whole = run_perdure(told.run_file, overrides, told.work)
    updates = perdure_updates(Store(spec.output.root))
    perdure = {"total_seconds": whole["total_seconds"], "updates": updates}
    perdure |= summary(updates[max(0, told.skip - 1) :])
    result: dict[str, Any] = {"machine": machine, "run_file": told.run_file, "set": told.set}
    result |= {"perdure": perdure, "trl": [run_trl(told, kind) for kind in told.generation]}
    ran = [side["seconds"] for side in result["trl"] if "seconds" in side]
    result["ratio"] = perdure["seconds"] / min(ran) if ran else None
    result["vllm"] = "not run: it pins another torch than the one that runs here"
    return result | {"load_average_after": os.getloadavg()}


def describe(name: str, side: dict[str, Any]) -> str:
    """One side in words."""
    if "error" in side:
        return f"{name}: {side['error']}"
    parts = ", ".join(
        f"{key.removesuffix('_seconds')} {side[key]:.3f}"
        for key in ("rollout_seconds", "reward_seconds", "train_seconds", "publish_seconds")
        if key in side
    )
    return (
        f"{name}: {side['seconds']:.3f} s an update ({parts}, other {side['other_seconds']:.3f}), "
        f"reward at the end {side['last_reward']:.3f}"
    )


def main() -> None:
    """Run both sides and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_file", nargs="?", default=str(RECIPE))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--skip", type=int, default=2, help="first updates that do not count")
    kinds = ["generate", "continuous"]
    parser.add_argument("--generation", nargs="+", choices=kinds, default=kinds[:1])
    parser.add_argument("--micro-batch", type=int, default=0, help="TRL's, in samples")
    parser.add_argument("--threads", type=int, default=0, help="TRL's torch threads; 0: all cores")
    parser.add_argument("--work", type=Path, help="where to leave the runs; default: a new folder")
    told = parser.parse_args()
    told.work = (told.work or Path(tempfile.mkdtemp(prefix="perdure-trl-"))).resolve()
    told.work.mkdir(parents=True, exist_ok=True)
    result = compare(told)
    (told.work / "trl_comparison.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    print(describe("Perdure", result["perdure"]))
    for side in result["trl"]:
        print(describe(f"TRL, {side['generation']}", side))
    print(f"ratio {result['ratio']}")


if __name__ == "__main__":
    main()
