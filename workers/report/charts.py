"""Line charts as coordinates: what a template draws as inline SVG."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 480, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 24
MOST_BUCKETS = 320
"""Of one curve: about one for each pixel, each drawn by its lowest and its highest point."""
MOST_DOTS = 160
_TICKS = 5

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: (x, y) by ascending x."""

    name: str
    points: Points
    dots: bool = False
    """Drawn as dots joined by a line, for figures that are few."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A curve in the coordinates of the picture."""

    name: str
    color: int
    path: str
    dots: tuple[tuple[str, str], ...]
    last: float
    least: float
    greatest: float


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of an axis: where, and what it says."""

    at: str
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture of ``WIDTH`` by ``HEIGHT``."""

    title: str
    unit: str
    meaning: str
    curves: tuple[Drawn, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def draw(title: str, unit: str, meaning: str, series: Iterable[Series]) -> Chart | None:
    """The chart of all ``series`` that have points; none when there are none."""
    kept = [each for each in series if each.points]
    if not kept:
        return None
    xs = [x for each in kept for x, _ in each.points]
    ys = [y for each in kept for _, y in each.points]
    x_low, x_high = _padded(min(xs), max(xs), 0.0)
    y_low, y_high = _padded(min(ys), max(ys), 0.06)

    def place(x: float, y: float) -> tuple[str, str]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f}", f"{down:.1f}"

    curves = tuple(
        Drawn(
            name=each.name,
            color=color,
            path="M" + "L".join(" ".join(place(*point)) for point in thinned(each.points)),
            dots=tuple(place(*point) for point in each.points[-MOST_DOTS:]) if each.dots else (),
            last=each.points[-1][1],
            least=min(y for _, y in each.points),
            greatest=max(y for _, y in each.points),
        )
        for color, each in enumerate(kept)
    )
    return Chart(
        title=title,
        unit=unit,
        meaning=meaning,
        curves=curves,
        x_ticks=tuple(Tick(place(x, y_low)[0], label(x)) for x in ticks(x_low, x_high)),
        y_ticks=tuple(Tick(place(x_low, y)[1], label(y)) for y in ticks(y_low, y_high)),
    )


def thinned(points: Points) -> Points:
    """At most ``2 * MOST_BUCKETS`` points: of each stretch the lowest and the highest."""
    if len(points) <= 2 * MOST_BUCKETS:
        return points
    kept: list[tuple[float, float]] = []
    for bucket in range(MOST_BUCKETS):
        start = bucket * len(points) // MOST_BUCKETS
        end = (bucket + 1) * len(points) // MOST_BUCKETS
        stretch = points[start:end]
        low = min(stretch, key=lambda point: point[1])
        high = max(stretch, key=lambda point: point[1])
        kept += sorted({low, high})
    return kept


def ticks(low: float, high: float) -> list[float]:
    """Round numbers within [low, high]: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [step * each for each in range(first, last + 1)]


def label(value: float) -> str:
    """A number in as few characters as tell it apart from its neighbors."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.1e}".replace("e+0", "e").replace("e-0", "e-")
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.6g}"


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    """The range with room around it; a range without extent gets some."""
    if high - low <= 1e-12 * max(1.0, abs(low)):
        room = max(abs(low) * 0.1, 0.5)
        return low - room, high + room
    room = (high - low) * share
    return low - room, high + room
