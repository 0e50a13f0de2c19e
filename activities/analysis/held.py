"""Means over time of values that were looked at now and then.

A value holds until the next look, at most ``MAX_HOLD_S`` seconds: later nobody knows. What is
unknown covers nothing, so a gap lowers the coverage and never the mean.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from activities.analysis.run_facts import number
from models.errors import ConfigurationError

MAX_HOLD_S = 10.0
FULL_COVERAGE = 0.95
"""From which a window counts as wholly observed."""
UNKNOWN = math.nan
"""In a column of values: nobody knows it then."""
_PERCENTILE = 0.95
_ROUNDING = 1e-9

Point = tuple[float, float | None]
"""(Unix time, value; None when it was unknown then)."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A value over a window; all None but ``coverage`` when nothing is known."""

    coverage: float = 0.0
    """Share of the window in which the value is known."""
    mean: float | None = None
    """Over the known time."""
    p95: float | None = None
    """Smallest value that is not exceeded in 95 % of the known time."""
    maximum: float | None = None
    empty_fraction: float | None = None
    """Share of the known time at exactly 0."""

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


class Series:
    """Values of one thing in time, for any number of windows."""

    def __init__(self, times: Iterable[float], values: Iterable[float]) -> None:
        """Looks at ``times`` (Unix, any order) and what each saw, ``UNKNOWN`` included."""
        self._times, self._values = array("d", times), array("d", values)
        if any(before > after for before, after in pairwise(self._times)):
            order = sorted(range(len(self._times)), key=self._times.__getitem__)
            self._times = array("d", (self._times[index] for index in order))
            self._values = array("d", (self._values[index] for index in order))

    def summary(self, start: float, end: float, max_hold: float = MAX_HOLD_S) -> Summary:
        """The window ``[start, end)``. Reads only the points that can matter there.

        Raises:
            ConfigurationError: the window or ``max_hold`` is empty.
        """
        if not start < end or not max_hold > 0:
            raise ConfigurationError(
                f"a window from {start} to {end} with values held for {max_hold} s covers nothing"
            )
        first = bisect_left(self._times, start - max_hold)
        last = bisect_right(self._times, end)
        times = self._times[first:last]
        times.append(end)
        held: dict[float, float] = {}
        for (time, following), value in zip(pairwise(times), self._values[first:last], strict=True):
            if value != value:  # UNKNOWN
                continue
            seconds = min(following, end, time + max_hold) - max(time, start)
            if seconds > 0:
                held[value] = held.get(value, 0.0) + seconds
        return _summary(held, end - start)


def as_value(found: Any) -> float:
    """What a look found as an entry of a column: ``UNKNOWN`` unless it is a finite number."""
    value = number(found)
    return UNKNOWN if value is None else value


def summarize(
    points: Iterable[Point], start: float, end: float, max_hold: float = MAX_HOLD_S
) -> dict[str, Any]:
    """``Series.summary`` of points in any order, as plain JSON."""
    seen = list(points)
    series = Series((time for time, _ in seen), (as_value(value) for _, value in seen))
    return series.summary(start, end, max_hold).document()


def _summary(held: Mapping[float, float], window: float) -> Summary:
    """``held``: value -> seconds."""
    covered = sum(held.values())
    if not covered:
        return Summary()
    reached, p95 = 0.0, None
    ordered = sorted(held)
    for value in ordered:
        reached += held[value]
        if reached >= (_PERCENTILE - _ROUNDING) * covered:
            p95 = value
            break
    return Summary(
        coverage=min(1.0, covered / window),
        mean=sum(value * seconds for value, seconds in held.items()) / covered,
        p95=p95,
        maximum=ordered[-1],
        empty_fraction=held.get(0.0, 0.0) / covered,
    )
