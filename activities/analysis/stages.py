"""Stages of updates, from ``driver_timing.jsonl``: what each update waited, trained, published."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from activities.analysis.run_facts import RunFacts, duration
from activities.storage import layout
from models.errors import ContractViolation

UPDATE_STAGES = ("generation_wait", "training", "publication")


@dataclass(frozen=True, slots=True)
class UpdateStages:
    """Seconds of one update, and the wall-clock times between which it ran."""

    update: int
    generation_wait: float
    """That the trainer waited; of an overlapped run without what training hid."""
    training: float
    publication: float
    start_unix: float
    end_unix: float

    @property
    def cycle(self) -> float:
        """Seconds of the update."""
        return self.generation_wait + self.training + self.publication


@dataclass(frozen=True, slots=True)
class Timings:
    """All stages of a run."""

    updates: tuple[UpdateStages, ...]
    """Those to be measured, ascending."""
    totals: dict[str, float]
    """Stage -> seconds of all its rows, failed and repeated ones included."""
    failed: int
    """Rows of stages that did not pass."""


def read_timings(facts: RunFacts, warmup: int) -> Timings:
    """Stages of the updates from ``warmup`` on.

    A run that is allowed to be incomplete is measured where it has all stages of an update.

    Raises:
        ContractViolation: a stage failed, is missing, came twice, or has an impossible time.
    """
    rows = facts.store.read_jsonl(layout.DRIVER_TIMING).rows
    totals: dict[str, float] = {}
    for row in rows:
        what = f"{row.get('stage')} of update {row.get('rollout_id')}"
        seconds = duration(row.get("seconds"), f"seconds of {what}")
        duration(row.get("started_unix"), f"started_unix of {what}")
        totals[row["stage"]] = totals.get(row["stage"], 0.0) + seconds
        if not row.get("passed"):
            facts.refuse(f"{what} failed")
    last = _last_rows(facts, rows)
    _add_unpublished(facts, last)
    measured = range(warmup, facts.num_updates)
    for update in measured:
        for stage in UPDATE_STAGES:
            if (stage, update) not in last:
                facts.refuse(f"{stage} of update {update} has no row in {layout.DRIVER_TIMING}")
    whole = [
        update for update in measured if all((stage, update) in last for stage in UPDATE_STAGES)
    ]
    if not whole:
        raise ContractViolation(
            f"{facts.store.root}: no update from {warmup} on has rows of {', '.join(UPDATE_STAGES)}"
        )
    busy = _Busy(last) if facts.overlaps else None
    updates = tuple(_stages(last, update, busy) for update in whole)
    if sum(update.cycle for update in updates) <= 0:
        raise ContractViolation(f"{facts.store.root}: all measured stages together took no time")
    return Timings(updates, totals, sum(not row.get("passed") for row in rows))


def _last_rows(
    facts: RunFacts, rows: Iterable[Mapping[str, Any]]
) -> dict[tuple[str, int], Mapping[str, Any]]:
    last: dict[tuple[str, int], Mapping[str, Any]] = {}
    for row in rows:
        if row["stage"] not in UPDATE_STAGES or not row.get("passed"):
            continue
        place = row["stage"], int(row["rollout_id"])
        if place in last:
            facts.refuse(f"{place[0]} of update {place[1]} was done more than once")
        last[place] = row
    return last


def _add_unpublished(facts: RunFacts, last: dict[tuple[str, int], Mapping[str, Any]]) -> None:
    """A publication of no time for updates that took no step: every group tied."""
    before: int | None = 0
    for place in facts.line.updates:
        after, trained = place.policy_version, last.get(("training", place.update))
        if trained is not None and after is not None and after == before:
            end = float(trained["started_unix"]) + float(trained["seconds"])
            last.setdefault(("publication", place.update), {"started_unix": end, "seconds": 0.0})
        before = after


def _stages(
    last: Mapping[tuple[str, int], Mapping[str, Any]], update: int, busy: "_Busy | None"
) -> UpdateStages:
    wait, training, publication = (last[stage, update] for stage in UPDATE_STAGES)
    waited = float(wait["seconds"])
    start = float(wait["started_unix"])
    if busy is not None:
        waited -= busy.seconds_between(start, start + waited)
        start = float(training["started_unix"]) - waited
    return UpdateStages(
        update=update,
        generation_wait=max(0.0, waited),
        training=float(training["seconds"]),
        publication=float(publication["seconds"]),
        start_unix=start,
        end_unix=float(publication["started_unix"]) + float(publication["seconds"]),
    )


class _Busy:
    """When an overlapped run trained or published."""

    def __init__(self, last: Mapping[tuple[str, int], Mapping[str, Any]]) -> None:
        spans = sorted(
            (float(row["started_unix"]), float(row["started_unix"]) + float(row["seconds"]))
            for (stage, _), row in last.items()
            if stage != "generation_wait"
        )
        self._spans: Sequence[tuple[float, float]] = spans
        self._ends = [end for _, end in spans]

    def seconds_between(self, start: float, end: float) -> float:
        """Seconds of ``[start, end)`` that training and publications cover."""
        covered = 0.0
        for index in range(bisect_left(self._ends, start), len(self._spans)):
            began, ended = self._spans[index]
            if began >= end:
                break
            covered += max(0.0, min(ended, end) - max(began, start))
        return covered
