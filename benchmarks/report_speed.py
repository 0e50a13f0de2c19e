"""Seconds and bytes of ``perdure report`` over the length of a run, and seconds of the analyses.

    python benchmarks/report_speed.py [--updates 250 500 1000] [--samples 64] [--tokens 128]

Each run is made by the writers of a real one: collections with their manifests, two rows of every
metric an update, timings of five stages, publications, the times of every sample, steps of the
trainer, and a look at pipeline, two engines and eight GPUs every two seconds. The report is made by
a process of its own, as from the command line. The analyses run in this process, and what counts is
its processor time, the least of ``--tries``: for each, microseconds a row of all files that it may
read, and how many times those of the shortest run. Nothing is judged: the targets are a report on
1,000 updates of 64 samples in under 20 seconds and 10 MB, and times that grow with the rows.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from activities.analysis import capacity, occupancy
from activities.rollout.collection_file import write_collection
from activities.storage import layout
from activities.storage.store import Store
from models.metrics import METRICS
from models.prompt import DataState
from models.rollout import CollectionCounts, CollectionManifest, RolloutCollection
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan

SIBLINGS = 8
STAGES = ("generation_wait", "training", "publication", "checkpoint", "evaluation")
START_UNIX = 1_700_000_000.0
UPDATE_S = 10.0
LOOK_S = 2.0
ENGINES = ("http://10.0.0.1:30000", "http://10.0.0.1:30001")
GAUGES = ("gen_throughput", "token_usage", "num_running_reqs", "num_queue_reqs", "cache_hit_rate")
GPUS = 8
ANALYSES: dict[str, Callable[[str], object]] = {
    "capacity": capacity.measurements,
    "occupancy": occupancy.analyze,
}


def main() -> None:
    """Make runs of each length, report each, print a line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, nargs="+", default=[250, 500, 1000])
    parser.add_argument("--samples", type=int, default=64, help="of an update")
    parser.add_argument("--tokens", type=int, default=128, help="of a response")
    parser.add_argument("--tries", type=int, default=3, help="of each analysis")
    options = parser.parse_args()
    least: dict[str, float] = {}
    for updates in options.updates:
        with tempfile.TemporaryDirectory() as root:
            rows = make_run(root, updates, options.samples, options.tokens)
            wall_s, cpu_s, num_bytes = measure(root)
            analyses = {name: analysis_cpu_s(name, root, options.tries) for name in ANALYSES}
        size = f"{updates} updates x {options.samples} samples, {rows} rows"
        print(f"{size}: {wall_s:.2f} s, {cpu_s:.2f} CPU s, {num_bytes / 1e6:.2f} MB", flush=True)
        for name, seconds in analyses.items():
            each = least.setdefault(name, seconds / rows)
            us, ratio = 1e6 * seconds / rows, seconds / rows / each
            print(f"  {name}: {seconds:.3f} CPU s, {us:.1f} us a row, ratio {ratio:.2f}")


def measure(root: str) -> tuple[float, float, int]:
    """Wall and CPU seconds of the command, start of Python included, and bytes of the page."""
    started, used = time.monotonic(), cpu_seconds_of_children()
    done = subprocess.run(
        [sys.executable, "-m", "workers", "report", root, "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    wall_s, cpu_s = time.monotonic() - started, cpu_seconds_of_children() - used
    return wall_s, cpu_s, int(json.loads(done.stdout)["bytes"])


def cpu_seconds_of_children() -> float:
    """Of all processes that were started from here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def analysis_cpu_s(name: str, root: str, tries: int) -> float:
    """Least processor seconds of one analysis."""
    seconds = []
    for _ in range(tries):
        started = time.process_time()
        ANALYSES[name](root)
        seconds.append(time.process_time() - started)
    return min(seconds)


def make_run(root: str, updates: int, samples: int, tokens: int) -> int:
    """Write a complete run of ``updates`` updates; how many rows its files have."""
    store, rng = Store(root), random.Random(1)
    store.write_json(
        layout.WORKFLOW_JSON,
        {
            "run_id": "train/made",
            "status": "complete",
            "started_unix": START_UNIX,
            "finished_unix": START_UNIX + updates * UPDATE_S,
        },
    )
    store.write_json(layout.RESOLVED_CONFIG, document_of(root, updates, samples))
    store.write_json(layout.PLAN_JSON, plan_of(updates))
    lines: dict[str, list[str]] = {}
    for update in range(updates):
        add_collection(store, update, samples, tokens, rng)
        add_rows(lines, update, samples, rng)
        add_looks(lines, update, rng)
    for path, rows in lines.items():
        Path(root, path).parent.mkdir(exist_ok=True)
        Path(root, path).write_text("\n".join(rows) + "\n")
    return updates + sum(map(len, lines.values()))


def add_collection(
    store: Store, update: int, samples: int, tokens: int, rng: random.Random
) -> None:
    """Commit the collection of ``update``; every other response is of two versions."""
    groups = [
        SampleGroup(
            group_index=index,
            prepared_sample_id=f"made:train:{index}",
            epoch_id=0,
            samples=[sample_of(index, each, update, tokens, rng) for each in range(SIBLINGS)],
        )
        for index in range(update * samples // SIBLINGS, (update + 1) * samples // SIBLINGS)
    ]
    uri = layout.collection_parquet(update, 1)
    sha256 = write_collection(store, uri, groups)
    manifest = CollectionManifest(
        collection=RolloutCollection(
            update=update,
            epoch=1,
            uri=uri,
            sha256=sha256,
            counts=CollectionCounts(
                groups=len(groups),
                samples=samples,
                prompt_tokens=samples,
                response_tokens=samples * tokens,
            ),
            reward_mean=0.5,
            min_version=max(0, update - 1),
            max_version=update,
            seconds=1.0,
            metrics={metric.name: rng.random() for metric in METRICS if "*" not in metric.name},
        ),
        data_after=DataState(sample_group_index=groups[-1].group_index + 1),
    )
    store.write_json(layout.collection_manifest(update, 1), manifest.model_dump(mode="json"))
    row = {"update": update, "epoch": 1, "batch_sha256": sha256, "policy_version": update + 1}
    store.append_jsonl(layout.UPDATES, row)


def sample_of(group: int, position: int, update: int, tokens: int, rng: random.Random) -> Sample:
    """A response of ``tokens`` tokens."""
    middle = tokens // 2
    spans = [TokenSpan(update, 0, tokens)]
    if position % 2 and update:
        spans = [TokenSpan(update - 1, 0, middle), TokenSpan(update, middle, tokens)]
    return Sample(
        sample_index=group * SIBLINGS + position,
        group_index=group,
        prompt_token_ids=[1, 2, 3],
        response_token_ids=[rng.randrange(30_000) for _ in range(tokens)],
        logprobs=[-rng.random() for _ in range(tokens)],
        spans=spans,
        finish_reason=FinishReason.STOP,
        text="made",
        reward=float(position % 2),
    )


def add_rows(lines: dict[str, list[str]], update: int, samples: int, rng: random.Random) -> None:
    """What an update appends to the JSONL files."""

    def add(path: str, row: dict[str, object]) -> None:
        lines.setdefault(path, []).append(json.dumps(row))

    start = START_UNIX + update * UPDATE_S
    numbers = {metric.name: rng.random() for metric in METRICS if "*" not in metric.name}
    for prefix, index in (("rollout/", "rollout/step"), ("train/", "train/rollout_id")):
        row = {name: value for name, value in numbers.items() if name.startswith(prefix)}
        add(layout.METRICS, {**row, index: update, "time_unix": start})
    for position, stage in enumerate(STAGES):
        row = {"stage": stage, "rollout_id": update, "passed": True, "seconds": 1.9}
        add(layout.DRIVER_TIMING, {**row, "started_unix": start + 2 * position})
    add(
        layout.PUBLICATION,
        {"version": update + 1, "digest": "a" * 64, "total_seconds": rng.random(), "engines": []},
    )
    for group in range(samples // SIBLINGS):
        times = [
            {"sample_index": each, "started_unix": start + group / 10} for each in range(SIBLINGS)
        ]
        row = {"group_index": group, "samples": times, "group_finished_unix": start + group}
        add(layout.sibling_timing(f"{group % 16:x}"), row)
    step = {"event": "optimizer", "step": update + 1, "rollout_id": update, "elapsed_seconds": 1.5}
    tokens = {"model_tokens": 9_000, "active_tokens": 8_000}
    add(layout.training_contract(0), {**step, "normalization": tokens})


def add_looks(lines: dict[str, list[str]], update: int, rng: random.Random) -> None:
    """What the observer and the GPU samples append while ``update`` goes on."""
    for look in range(int(UPDATE_S / LOOK_S)):
        now = START_UNIX + update * UPDATE_S + look * LOOK_S
        held = {"groups": look, "samples": look * SIBLINGS, "response_tokens": look * 1_000}
        rows: dict[str, dict[str, object]] = {
            layout.PIPELINE_OCCUPANCY: {"producer_owned_groups": look, "completed_queue": held}
        }
        for url in ENGINES:
            series = [{"name": name, "labels": {}, "value": rng.random()} for name in GAUGES]
            rows[layout.engine_occupancy(url)] = {"engine": url, "series": series}
        values = {"utilization.gpu": look, "utilization.memory": 1, "memory.used": 512}
        devices = [{"index": index, "uuid": f"GPU-{index}", **values} for index in range(GPUS)]
        rows["checkpoints/gpu_usage_node0.jsonl"] = {"host": "made", "devices": devices}
        for path, row in rows.items():
            lines.setdefault(path, []).append(json.dumps({"time_unix": now, **row}))


def plan_of(updates: int) -> dict[str, object]:
    """``plan.json`` of two engines of two GPUs beside a trainer of four."""
    return {
        "runtime": {"shape": {"updates": updates, "fully_async": False, "overlapped": False}},
        "allocation": {
            "placement": "disaggregated",
            "trainer_processes": 1,
            "engine_processes": len(ENGINES),
            "gpus": {
                "allocated_gpus": GPUS,
                "nodes": [{"trainer_gpus": 4, "rollout_gpus": 4, "ray_gpus": GPUS}],
            },
        },
    }


def document_of(root: str, updates: int, samples: int) -> dict[str, object]:
    """A run file of that shape."""
    return {
        "schema_version": 1,
        "name": "made",
        "model": {"source": "/models/small"},
        "data": {"prompt_data": "/data/train.jsonl"},
        "output": {"root": root},
        "training": {
            "rollout_batch_size": samples // SIBLINGS,
            "samples_per_prompt": SIBLINGS,
            "num_rollouts": updates,
        },
    }


if __name__ == "__main__":
    main()
