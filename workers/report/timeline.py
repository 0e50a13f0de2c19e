"""When the stages of a run ran, as lanes of bars: what overlapped is seen and measured."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from activities.storage import layout
from workers.report.charts import label, ticks
from workers.report.files import Row, RunFiles, index, number, parts

WIDTH, LANE, LEFT, AXIS = 1120, 26, 150, 22
BAR = 18
ZOOM_UPDATES = 6
"""Updates in a close-up: bars wide enough to be told apart."""
MOST_BARS = 400
"""Of a close-up's lane; more are drawn joined."""
SAMPLING = "sampling"
"""Lane of the time in which any response was being sampled, whichever stage ran."""
_ORDER = (
    "placement",
    "initial_publication",
    "generation_wait",
    SAMPLING,
    "training",
    "publication",
    "checkpoint",
    "evaluation",
    "final_hf_export",
)

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the timings: a stage that ended."""

    name: str
    update: int | None
    start: float
    """Unix seconds."""
    end: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Bar:
    """A stage in a close-up."""

    x: str
    width: str
    label: str
    title: str
    passed: bool


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a picture."""

    name: str
    color: int
    y: int
    path: str
    """All bars that passed as one path."""
    failed_path: str
    bars: tuple[Bar, ...] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """A stretch of time."""

    title: str
    height: int
    lanes: tuple[Lane, ...]
    ticks: tuple[tuple[str, str], ...]
    """(x, seconds since the start)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a stage took in all."""

    name: str
    count: int
    failed: int
    seconds: float
    median: float
    longest: float
    share: float
    """Of the time from the first stage's start to the last one's end."""
    during_training: float
    """Of its own time, the share in which the trainer worked as well."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """See the module."""

    pictures: tuple[Picture, ...]
    costs: tuple[Cost, ...]
    seconds: float
    newest: float | None
    """Unix seconds at which the last stage ended."""


def read_stages(files: RunFiles) -> list[Stage]:
    """Stages by start; rows without times are passed over."""
    stages = []
    for row in files.rows(layout.DRIVER_TIMING):
        start, seconds = number(row, "started_unix"), number(row, "seconds")
        if start is None or seconds is None or seconds < 0:
            continue
        stages.append(
            Stage(
                name=str(row.get("stage", "?"))[:40],
                update=index(row, "rollout_id"),
                start=start,
                end=start + seconds,
                passed=row.get("passed") is not False,
            )
        )
    return sorted(stages, key=lambda stage: (stage.start, stage.end))


def read_sampling(files: RunFiles) -> list[Interval]:
    """When prompt groups were being sampled, joined where they touch."""
    spans: list[Interval] = []
    for name in files.names("checkpoints"):
        if name.startswith("sibling_timing_") and name.endswith(".jsonl"):
            spans += filter(None, map(_span, files.rows(f"checkpoints/{name}")))
    return joined(spans, 0.0)


def timeline_of(stages: Sequence[Stage], sampling: Sequence[Interval]) -> Timeline | None:
    """Pictures and costs; none before the first stage ended."""
    if not stages:
        return None
    start, end = stages[0].start, max(stage.end for stage in stages)
    pictures = [_picture("the whole run", stages, sampling, (start, end), close=False)]
    updates = sorted({s.update for s in stages if s.name == "training" and s.update is not None})
    for title, first in _close_ups(updates):
        window = _window(stages, first, first + ZOOM_UPDATES - 1)
        if window is not None:
            pictures.append(_picture(title, stages, sampling, window, close=True))
    return Timeline(
        pictures=tuple(pictures),
        costs=_costs(stages, sampling, end - start),
        seconds=end - start,
        newest=end,
    )


def joined(spans: Iterable[Interval], gap: float) -> list[Interval]:
    """The union of ``spans``; those less than ``gap`` apart become one."""
    union: list[Interval] = []
    for start, end in sorted(spans):
        if union and start - union[-1][1] <= gap:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((start, end))
    return union


def common(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Seconds in both of two unions."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def _span(row: Row) -> Interval | None:
    starts = [number(sample, "started_unix") for sample in parts(row, "samples")]
    known = [start for start in starts if start is not None]
    end = number(row, "group_finished_unix")
    if not known or end is None or end < min(known):
        return None
    return min(known), end


def _close_ups(updates: Sequence[int]) -> list[tuple[str, int]]:
    """(title, first update): the middle of the run and its end, when they are not all of it."""
    if len(updates) <= ZOOM_UPDATES:
        return []
    middle = updates[(len(updates) - ZOOM_UPDATES) // 2]
    last = updates[-ZOOM_UPDATES]
    firsts = [middle] if last - middle < ZOOM_UPDATES else [middle, last]
    return [(f"updates {first} to {first + ZOOM_UPDATES - 1}", first) for first in firsts]


def _window(stages: Sequence[Stage], first: int, last: int) -> Interval | None:
    """From the first to the last moment of the trainings and publications of those updates."""
    inside = [
        stage
        for stage in stages
        if stage.update is not None
        and first <= stage.update <= last
        and stage.name in ("training", "publication")
    ]
    if not inside:
        return None
    start, end = min(stage.start for stage in inside), max(stage.end for stage in inside)
    room = max((end - start) * 0.02, 1e-3)
    return start - room, end + room


def _picture(
    title: str,
    stages: Sequence[Stage],
    sampling: Sequence[Interval],
    window: Interval,
    *,
    close: bool,
) -> Picture:
    start, end = window
    scale = (WIDTH - LEFT - 10) / max(end - start, 1e-6)
    seen = [stage for stage in stages if stage.end >= start and stage.start <= end]
    names = sorted({stage.name for stage in seen} | ({SAMPLING} if sampling else set()), key=_rank)
    lanes = []
    for position, name in enumerate(names):
        y = position * LANE + (LANE - BAR) // 2
        mine = [stage for stage in seen if stage.name == name]
        labeled = close and len(mine) <= MOST_BARS and name != SAMPLING
        passed = [(stage.start, stage.end) for stage in mine if stage.passed]
        failed = [(stage.start, stage.end) for stage in mine if not stage.passed]
        lanes.append(
            Lane(
                name=name,
                color=_rank(name)[0],
                y=y,
                path=""
                if labeled
                else _path(passed if name != SAMPLING else sampling, window, scale, y),
                failed_path="" if labeled else _path(failed, window, scale, y),
                bars=tuple(_bar(stage, window, scale) for stage in mine) if labeled else (),
            )
        )
    marks = tuple(
        (f"{LEFT + seconds * scale:.1f}", f"{label(seconds)} s")
        for seconds in ticks(0.0, max(end - start, 1e-6))
    )
    return Picture(title, len(lanes) * LANE + AXIS, tuple(lanes), marks)


def _rank(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER)), name


def _path(spans: Iterable[Interval], window: Interval, scale: float, y: int) -> str:
    """Bars in one path; what is less than half a pixel apart is one bar."""
    inside = [
        (max(start, window[0]), min(end, window[1]))
        for start, end in spans
        if end >= window[0] and start <= window[1]
    ]
    return "".join(
        f"M{LEFT + (start - window[0]) * scale:.1f} {y}h{max((end - start) * scale, 0.6):.1f}"
        f"v{BAR}h-{max((end - start) * scale, 0.6):.1f}z"
        for start, end in joined(inside, 0.5 / scale)
    )


def _bar(stage: Stage, window: Interval, scale: float) -> Bar:
    start, end = max(stage.start, window[0]), min(stage.end, window[1])
    width = max((end - start) * scale, 0.8)
    where = "" if stage.update is None else f" of update {stage.update}"
    fits = stage.update is not None and width >= 9 * len(str(stage.update)) + 4
    return Bar(
        x=f"{LEFT + (start - window[0]) * scale:.1f}",
        width=f"{width:.1f}",
        label=str(stage.update) if fits else "",
        title=f"{stage.name}{where}: {stage.end - stage.start:.3g} s"
        + ("" if stage.passed else ", failed"),
        passed=stage.passed,
    )


def _costs(
    stages: Sequence[Stage], sampling: Sequence[Interval], seconds: float
) -> tuple[Cost, ...]:
    by_name: dict[str, list[Stage]] = {}
    for stage in stages:
        by_name.setdefault(stage.name, []).append(stage)
    training = joined(((s.start, s.end) for s in by_name.get("training", ())), 0.0)
    costs = []
    for name in sorted({*by_name, *([SAMPLING] if sampling else ())}, key=_rank):
        mine = by_name.get(name, [])
        union = sampling if name == SAMPLING else joined(((s.start, s.end) for s in mine), 0.0)
        lengths = [end - start for start, end in union] if name == SAMPLING else _lengths(mine)
        total = sum(end - start for start, end in union)
        costs.append(
            Cost(
                name=name,
                count=len(lengths),
                failed=sum(not stage.passed for stage in mine),
                seconds=total,
                median=median(lengths),
                longest=max(lengths),
                share=total / seconds if seconds else 0.0,
                during_training=common(union, training) / total if total else 0.0,
            )
        )
    return tuple(costs)


def _lengths(stages: Sequence[Stage]) -> list[float]:
    return [stage.end - stage.start for stage in stages]
