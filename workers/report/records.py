"""Tables of a run: what went wrong, what was saved, what was published."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pydantic import ValidationError

from activities.storage import layout
from activities.storage.commit import FENCED_OFF
from models.checkpoint import CheckpointMarker
from workers.report.curves import Curves
from workers.report.files import Row, RunFiles, index, number, parts
from workers.report.timeline import Stage

MOST_CHECKPOINTS = 100
_FIRST, _SLOWEST, _LAST = 5, 10, 25
"""Publications shown of many."""
_CATEGORIES = ("transport", "overload", "unavailable", "timeout")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that went wrong, or what was done about it."""

    unix: float | None
    what: str
    where: str
    detail: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's folder."""

    folder: str
    marker: CheckpointMarker | None
    """None when it was never completed, or cannot be read."""

    @property
    def num_bytes(self) -> int:
        """Of all its files."""
        return sum(file.num_bytes for file in self.marker.files) if self.marker else 0


@dataclass(frozen=True, slots=True)
class Publication:
    """Engines took one version."""

    version: int | None
    update: int | None
    epoch: int | None
    unix: float | None
    mode: str
    transport: str
    seconds: float | None
    num_bytes: float | None
    engines: int
    digest: str
    agrees: bool
    """Whether every engine showed the digest of the trainer's weights."""


@dataclass(frozen=True, slots=True)
class Publications:
    """Weights that engines took."""

    count: int
    median_seconds: float | None
    longest_seconds: float | None
    disagreeing: int
    """Publications after which an engine's digest differed from the trainer's."""
    shown: tuple[Publication, ...]


def faults_of(files: RunFiles, stages: Sequence[Stage], workflow: Row) -> list[Fault]:
    """Everything that went wrong, by time; what has no time comes last."""
    found = [
        Fault(
            stage.end,
            "stage failed",
            stage.name + ("" if stage.update is None else f", update {stage.update}"),
            f"after {stage.end - stage.start:.3g} s",
        )
        for stage in stages
        if not stage.passed
    ]
    found += _epochs(files)
    found += _replaced(files)
    for row in files.rows(layout.ROLLOUT_ERRORS):
        if row.get("fatal"):
            found.append(
                Fault(number(row, "time_unix"), "sampling ended", "producer", str(row["fatal"]))
            )
    if error := workflow.get("error"):
        found.append(Fault(number(workflow, "finished_unix"), "run failed", "workflow", str(error)))
    return sorted(found, key=lambda fault: fault.unix if fault.unix is not None else float("inf"))


def _epochs(files: RunFiles) -> list[Fault]:
    """Every claim of the root after the first: a rebuild after a loss, or a resumption."""
    found = []
    for name in files.names(layout.LEASE):
        if not name.startswith("epoch-"):
            continue
        claim = files.document(f"{layout.LEASE}/{name}")
        epoch = index(claim, "epoch")
        if epoch is not None and epoch > 1:
            owner = claim.get("owner")
            host = owner.get("host", "") if isinstance(owner, dict) else ""
            found.append(
                Fault(
                    number(claim, "claimed_unix"),
                    "rebuilt or resumed",
                    f"epoch {epoch}",
                    f"by {host}" if host else "",
                )
            )
    return found


def _replaced(files: RunFiles) -> list[Fault]:
    return [
        Fault(
            number(row, "time_unix"),
            "engine replaced",
            f"publication of version {row.get('version')}",
            str(row["replaced"]),
        )
        for row in files.rows(layout.PUBLICATION)
        if row.get("replaced")
    ]


def serving_errors(files: RunFiles, curves: Curves) -> dict[str, float]:
    """Counts over the whole run: failed group attempts by category, and verdicts."""
    rows = files.rows(layout.ROLLOUT_ERRORS)
    counts = {
        f"group attempts failed: {category}": _over_restarts(rows, f"errors/{category}_groups")
        for category in _CATEGORIES
    }
    counts["verifier failures"] = curves.total("rollout/error_verdicts")
    counts["answers that could not be read"] = curves.total("rollout/invalid_verdicts")
    for reason, count in curves.with_prefix("rollout/dynamic_filter/").items():
        counts[f"groups filtered: {reason}"] = count
    return counts


def _over_restarts(rows: Sequence[Row], key: str) -> float:
    """The sum of a counter that starts over with its process."""
    total = last = 0.0
    for row in rows:
        value = number(row, key)
        if value is not None:
            total += value - last if value >= last else value
            last = value
    return total


def checkpoints_of(files: RunFiles) -> list[Checkpoint]:
    """The folders that are kept, newest first."""
    folders = sorted(files.names(layout.CHECKPOINT_FOLDERS), reverse=True)
    return [
        Checkpoint(name, _marker(files, f"{layout.CHECKPOINT_FOLDERS}/{name}/{layout.COMPLETE}"))
        for name in folders[:MOST_CHECKPOINTS]
    ]


def _marker(files: RunFiles, path: str) -> CheckpointMarker | None:
    document: dict[str, Any] = files.document(path)
    try:
        is_marker = document and FENCED_OFF not in document
        return CheckpointMarker.model_validate(document) if is_marker else None
    except ValidationError as error:
        files.note(path, error)
        return None


def publications_of(files: RunFiles) -> Publications:
    """All publications as figures, and of many the first, the slowest and the last."""
    every = [_publication(row) for row in files.rows(layout.PUBLICATION)]
    seconds = [each.seconds for each in every if each.seconds is not None]
    slowest = sorted(range(len(every)), key=lambda at: every[at].seconds or 0.0)
    kept = {*range(_FIRST), *slowest[-_SLOWEST:], *range(len(every) - _LAST, len(every))}
    return Publications(
        count=len(every),
        median_seconds=median(seconds) if seconds else None,
        longest_seconds=max(seconds, default=None),
        disagreeing=sum(not each.agrees for each in every),
        shown=tuple(each for at, each in enumerate(every) if at in kept),
    )


def _publication(row: Row) -> Publication:
    engines = parts(row, "engines")
    return Publication(
        version=index(row, "version"),
        update=index(row, "rollout_id"),
        epoch=index(row, "epoch"),
        unix=number(row, "time_unix"),
        mode=str(row.get("mode", "")),
        transport=str(row.get("transport", "")),
        seconds=number(row, "total_seconds"),
        num_bytes=number(row, "num_bytes"),
        engines=len(engines),
        digest=str(row.get("digest", "")),
        agrees=all(engine.get("digest") == row.get("digest") for engine in engines),
    )
