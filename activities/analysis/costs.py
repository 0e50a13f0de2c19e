"""What an update costs and how much of it is the control plane, from a run's artifacts alone.

Seconds of an update are wall time from the start of the first collection to the end of the last
publication, less checkpoints, evaluations and rebuilds in between and less the time in which no
stage ran (the run was paused, or stopped and resumed), over the number of updates. The control
plane (Temporal, Ray calls, files) is what remains when the work that the actors report is taken
away: sampling and scoring in the producer, the optimizer in the trainer, the publication.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from activities.storage import layout
from activities.storage.store import Store

LONGEST_STEP_S = 5.0
"""Between two stages of a run that goes on; when nothing runs for longer, the run did not."""

_UPDATE_STAGES = ("generation_wait", "training", "publication")


@dataclass(frozen=True, slots=True)
class UpdateCosts:
    """Means over the updates of a run, in seconds."""

    seconds_per_update: float
    rollout_seconds: float
    train_seconds: float
    publish_seconds: float

    @property
    def control_plane_share(self) -> float | None:
        """Share of an update that is no actor's work; none when sampling and training overlap."""
        work = self.rollout_seconds + self.train_seconds + self.publish_seconds
        if work > self.seconds_per_update:
            return None
        return (self.seconds_per_update - work) / self.seconds_per_update


def update_costs(store: Store) -> UpdateCosts | None:
    """Costs of the updates under ``store``; None before the first finished one."""
    rows = store.read_jsonl(layout.DRIVER_TIMING).rows
    timings = [row for row in rows if row["passed"]]
    stages = [row for row in timings if _is_update(row)]
    num_updates = sum(row["stage"] == "training" for row in stages)
    metrics = store.read_jsonl(layout.METRICS).rows
    rollout, train = _mean_of(metrics, "rollout/seconds"), _mean_of(metrics, "train/step_seconds")
    published = [row["seconds"] for row in stages if row["stage"] == "publication"]
    if not num_updates or rollout is None or train is None:
        return None
    first = min(row["started_unix"] for row in stages)
    last = max(row["started_unix"] + row["seconds"] for row in stages)
    aside = sum(
        row["seconds"]
        for row in timings
        if not _is_update(row) and first <= row["started_unix"] < last
    )
    return UpdateCosts(
        seconds_per_update=(last - first - aside - _idle_s(rows, first, last)) / num_updates,
        rollout_seconds=rollout,
        train_seconds=train,
        publish_seconds=mean(published) if published else 0.0,
    )


def _idle_s(rows: Iterable[Mapping[str, Any]], first: float, last: float) -> float:
    """Seconds between ``first`` and ``last`` in which the run did not go on."""
    idle_s, covered = 0.0, first
    for row in sorted(rows, key=lambda row: float(row["started_unix"])):
        if (
            covered <= row["started_unix"] <= last
            and row["started_unix"] - covered > LONGEST_STEP_S
        ):
            idle_s += row["started_unix"] - covered
        covered = max(covered, row["started_unix"] + row["seconds"])
    return idle_s


def _is_update(row: Mapping[str, Any]) -> bool:
    return row["rollout_id"] is not None and row["stage"] in _UPDATE_STAGES


def _mean_of(rows: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return mean(values) if values else None
