"""What became of the finished groups of a fully async run, between two collections.

Counts go into a window that ``QueueMetrics.collect`` reads and resets. Every key is always there:
a zero says that nothing happened, which an absent key would not.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from models.sample import SampleGroup

PREFIX = "rollout/fully_async/"
QUEUE_PREFIX = f"{PREFIX}completed_queue/"

LENGTH_STARTS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384)
LENGTH_BINS = (
    "0_255",
    "256_511",
    "512_1023",
    "1024_2047",
    "2048_4095",
    "4096_8191",
    "8192_16383",
    "16384_plus",
)
"""Response tokens of a sample."""
AGE_STARTS = (0, 1, 2, 3, 4, 5, 9, 17)
AGE_BINS = ("0", "1", "2", "3", "4", "5_8", "9_16", "17_plus")
UNKNOWN_AGE = "unknown"
"""Optimizer steps between the published version and the oldest one of any token of the group."""

_FLOW_NAMES = (
    "groups",
    "samples",
    "response_tokens",
    *(f"samples_by_length/{name}" for name in LENGTH_BINS),
    *(f"samples_by_age/{name}" for name in (*AGE_BINS, UNKNOWN_AGE)),
)

RejectReason = Literal["policy", "incomplete", "mixed_policy"]
_REASONS: tuple[RejectReason, ...] = ("policy", "incomplete", "mixed_policy")


class QueueMetrics:
    """Counts groups as they leave the queue of finished groups; belongs to one event loop.

    A group leaves it *delivered* (into a collection) or *dropped* (anything else, whether its
    prompt is sampled again or not). Ages are optimizer steps; one below 0, a group of a version
    that is not published everywhere yet, counts as 0.
    """

    def __init__(self) -> None:
        self._lost = _Lost()
        self._reset()

    def _reset(self) -> None:
        self._told, self._lost = self._lost, _Lost()
        self._delivered = _Flow()
        self._ages: list[int] = []
        self._waited_s = 0.0

    def delivered(self, group: SampleGroup, age: int | None) -> None:
        """``group`` went into a collection at ``age``."""
        self._delivered.add(group, age)
        if age is not None:
            self._ages.append(max(0, age))

    def dropped(self, group: SampleGroup, age: int | None) -> None:
        """``group`` left the queue for anything but a collection; None when its age is unknown."""
        self._lost.flow.add(group, age)

    def rejected(self, reason: RejectReason) -> None:
        """A group was refused for the version(s) that sampled it or for missing samples."""
        self._lost.rejected[reason] += 1

    def aborted(self) -> None:
        """A group was given back because it was cancelled before it was finished."""
        self._lost.aborted += 1

    def stale(self) -> None:
        """A finished group was older than its limit."""
        self._lost.stale += 1

    def waited(self, seconds: float) -> None:
        """A collection waited so long for the queue to hold a group."""
        self._waited_s += seconds

    def collect(self, size: int, ages: Sequence[int]) -> dict[str, float]:
        """Every metric of the window that ends here; the next one begins.

        Args:
            size: finished groups that wait now.
            ages: their ages, as far as they are known.
        """
        waiting = [max(0, age) for age in ages]
        lost, delivered = self._lost, self._delivered.counts
        metrics: dict[str, float] = {
            f"{PREFIX}queue_size": float(size),
            f"{PREFIX}aborted_groups_filtered": float(lost.aborted),
            f"{PREFIX}stale_groups_filtered": float(lost.stale),
            f"{PREFIX}avg_staleness": _mean(self._ages),
            f"{PREFIX}max_staleness": float(max(self._ages, default=0)),
            f"{PREFIX}buffer_avg_staleness": _mean(waiting),
            f"{PREFIX}buffer_max_staleness": float(max(waiting, default=0)),
            **{f"{PREFIX}rejected_{name}_groups": float(n) for name, n in lost.rejected.items()},
            f"{QUEUE_PREFIX}consumer_wait_seconds": self._waited_s,
        }
        for name, dropped in lost.flow.counts.items():
            metrics[f"{QUEUE_PREFIX}dropped_{name}"] = float(dropped)
            metrics[f"{QUEUE_PREFIX}delivered_{name}"] = float(delivered[name])
            fraction = dropped / max(1, dropped + delivered[name])
            metrics[f"{QUEUE_PREFIX}dropped_{_fraction_name(name)}"] = fraction
        self._reset()
        return metrics

    def give_back(self) -> None:
        """The last collection was not committed: what was lost before it counts with the next one.

        Its groups went back into the queue, so they were not delivered; its wait was its own.
        """
        self._lost.merge(self._told)
        self._told = _Lost()


class _Lost:
    """What did not go into a collection."""

    def __init__(self) -> None:
        self.flow = _Flow()
        self.rejected: dict[RejectReason, int] = dict.fromkeys(_REASONS, 0)
        self.aborted = 0
        self.stale = 0

    def merge(self, other: "_Lost") -> None:
        self.flow.merge(other.flow)
        for reason, count in other.rejected.items():
            self.rejected[reason] += count
        self.aborted += other.aborted
        self.stale += other.stale


class _Flow:
    """Groups, samples and response tokens that left the queue one way."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(_FLOW_NAMES, 0)
        """By the part of their name that follows ``dropped_`` and ``delivered_``."""

    def add(self, group: SampleGroup, age: int | None) -> None:
        counts = self.counts
        counts["groups"] += 1
        counts["samples"] += len(group.samples)
        counts["response_tokens"] += group.response_tokens
        counts[f"samples_by_age/{age_bin(age)}"] += len(group.samples)
        for sample in group.samples:
            counts[f"samples_by_length/{length_bin(len(sample.response_token_ids))}"] += 1

    def merge(self, other: "_Flow") -> None:
        for name, count in other.counts.items():
            self.counts[name] += count


def length_bin(tokens: int) -> str:
    """The name of the bin of a response of ``tokens`` tokens."""
    return LENGTH_BINS[bisect_right(LENGTH_STARTS, tokens) - 1]


def age_bin(age: int | None) -> str:
    """The name of the bin of a group of ``age`` optimizer steps."""
    if age is None:
        return UNKNOWN_AGE
    return AGE_BINS[bisect_right(AGE_STARTS, max(0, age)) - 1]


def _fraction_name(name: str) -> str:
    """``samples`` -> ``samples_fraction``; ``X_by_age/0`` -> ``X_fraction_by_age/0``."""
    head, by, tail = name.partition("_by_")
    return f"{head}_fraction{by}{tail}"


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
