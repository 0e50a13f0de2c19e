"""Numbers as characters: a sparkline and a column chart."""

import itertools
from collections.abc import Sequence

_LEVELS = " ▁▂▃▄▅▆▇█"
_ASCII_LEVELS = " .:-=+*%#"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The newest ``width`` values, one character each, scaled between their extremes."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    steps = len(_LEVELS) - 2
    span = high - low
    return "".join(
        _LEVELS[1 + (round((value - low) / span * steps) if span else steps // 2)]
        for value in shown
    )


def columns(
    values: Sequence[float],
    *,
    height: int = 8,
    max_width: int = 72,
    low: float = 0.0,
    high: float | None = None,
    ascii_only: bool = False,
) -> list[str]:
    """A column chart, top line first, with the scale on the left and indices below.

    Args:
        values: one value an update; more than ``max_width`` are averaged in equal stretches.
        height: text lines of the plot; each resolves eight levels.
        max_width: most columns.
        low: value at the bottom.
        high: value at the top; default: the largest value, or 1 when all lie in [0, 1].
        ascii_only: draw without block characters.
    """
    if not values:
        return []
    bars = _averaged(values, max_width)
    repeat = max(1, min(3, max_width // len(bars)))
    top = high if high is not None else (1.0 if max(bars) <= 1.0 else max(bars))
    levels = _ASCII_LEVELS if ascii_only else _LEVELS
    lines = []
    for row in range(height, 0, -1):
        text = "".join(_cell(bar, row, height, low, top, levels) * repeat for bar in bars)
        edge = low + (top - low) * row / height
        label = f"{edge:6.2f}" if row in (height, (height + 1) // 2) else " " * 6
        lines.append(f"{label} |{text}".rstrip())
    lines.append(f"{low:6.2f} +{'-' * (len(bars) * repeat)}")
    last = str(len(values) - 1)
    lines.append(f"        0{last.rjust(max(len(bars) * repeat - 1, len(last) + 1))}")
    return lines


def _averaged(values: Sequence[float], most: int) -> list[float]:
    """``values`` in at most ``most`` equal stretches, each as its mean."""
    if len(values) <= most:
        return list(values)
    edges = [round(index * len(values) / most) for index in range(most + 1)]
    return [
        sum(values[start:end]) / (end - start)
        for start, end in itertools.pairwise(edges)
        if end > start
    ]


def _cell(value: float, row: int, height: int, low: float, top: float, levels: str) -> str:
    """The character of one column in one line: how much of the line the bar fills."""
    share = (value - low) / (top - low) if top > low else 0.0
    filled = share * height - (row - 1)
    return levels[max(0, min(len(levels) - 1, round(filled * (len(levels) - 1))))]
