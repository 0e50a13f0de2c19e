"""What the files of a run say about its publications, stages, engines and GPUs.

No benchmark itself: ``scaling_runs.py`` makes the runs. The first ``WARM_UP`` updates do not count.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_overlap import WARM_UP

from activities.analysis.occupancy import analyze
from activities.storage import layout
from activities.storage.store import Store
from models.errors import PerdureError

FIRST_PUBLICATIONS = 2
"""Of a run: the first ones connect and allocate."""


def publication_row(store: Store, trainers: int) -> dict[str, Any]:
    """Medians of the publications after the first two, and what all engines confirmed."""
    rows = [row for row in store.read_jsonl(layout.PUBLICATION).rows if row["buckets"]]
    kept = rows[FIRST_PUBLICATIONS:]
    if not kept:
        raise SystemExit(f"{store.root}: only {len(rows)} publications moved weights")

    def middle(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(value, kept))

    return {
        "engines": len(kept[-1]["engines"]),
        "trainers": trainers,
        "transport": kept[-1]["transport"],
        "publications": len(kept),
        "bytes": kept[-1]["num_bytes"],
        "seconds": middle(lambda row: row["total_seconds"] - row["folder_seconds"]),
        "load_seconds": middle(lambda row: row["load_seconds"]),
        "bytes_per_s": middle(lambda row: row["num_bytes"] / row["load_seconds"]),
        "folder_seconds": middle(lambda row: row["folder_seconds"]),
        "first_seconds": rows[0]["total_seconds"] - rows[0]["folder_seconds"],
        "confirmed": confirmed(rows),
        "last": [
            {name: each[name] for name in ("engine", "version", "digest")}
            for each in kept[-1]["engines"]
        ],
    }


def confirmed(rows: list[dict[str, Any]]) -> bool:
    """Whether in each publication every engine showed the trainer's version and digest."""
    return all(
        row["engines"]
        and all(
            (each["version"], each["digest"]) == (row["version"], row["digest"])
            for each in row["engines"]
        )
        for row in rows
    )


def stage_medians(store: Store) -> dict[str, float]:
    """Seconds of every stage of the driver after the warm-up."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for row in store.read_jsonl(layout.DRIVER_TIMING).rows:
        if row["passed"] and (row["rollout_id"] or 0) >= WARM_UP:
            seconds[row["stage"]].append(row["seconds"])
    return {stage: statistics.median(values) for stage, values in seconds.items()}


def window(store: Store) -> tuple[float, float]:
    """Unix times between which updates count."""
    rows = [
        row
        for row in store.read_jsonl(layout.DRIVER_TIMING).rows
        if row["stage"] == "publication" and (row["rollout_id"] or 0) >= WARM_UP - 1
    ]
    ends = sorted(row["started_unix"] + row["seconds"] for row in rows)
    return ends[0], ends[-1]


def engines_empty(store: Store) -> dict[str, float] | None:
    """Share of time in which an engine was seen without a running request; None: not known."""
    try:
        seen = analyze(store.root, WARM_UP, window(store), allow_incomplete=True)
    except PerdureError:
        return None
    return {
        url: series["empty_fraction"]
        for url, engine in seen["engines"].items()
        for series in engine["series"]
        if "num_running_reqs" in series["name"] and series["empty_fraction"] is not None
    } or None


def gpu_idle(store: Store, samples: Store, file: str) -> dict[str, float] | None:
    """GPU -> share of time without a kernel, by the samples of ``perdure gpu-usage`` in ``file``.

    Of the updates of ``store`` that count; None without samples, as on a CPU.
    """
    start, end = window(store)
    busy: dict[str, list[float]] = defaultdict(list)
    for row in samples.read_jsonl(file).rows:
        for device in row.get("devices", ()):
            if start <= row["time_unix"] <= end and device["utilization.gpu"] is not None:
                busy[str(device["index"])].append(device["utilization.gpu"] / 100)
    return {gpu: 1 - statistics.mean(shares) for gpu, shares in sorted(busy.items())} or None


def process_of(root: Path, role: str) -> dict[str, Any]:
    """The newest life of the role's first process."""
    rows: list[dict[str, Any]] = json.loads((root / layout.FLEET_JSON).read_text())
    return next(row for row in rows if (row["role"], row["rank"]) == (role, 0))


def num_updates(root: Path) -> int:
    """Finished updates, those that were done again counted again."""
    file = root / layout.UPDATES
    return len(file.read_text().splitlines()) if file.exists() else 0


def state_of(root: Path) -> str:
    """State of the run by its own file."""
    file = root / layout.WORKFLOW_JSON
    return str(json.loads(file.read_text())["status"]) if file.exists() else "absent"
