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

RejectReason = Literal["policy", "incomplete", "mixed_policy"]
_REASONS: tuple[RejectReason, ...] = ("policy", "incomplete", "mixed_policy")


class QueueMetrics:
    """Counts groups as they leave the queue of finished groups; belongs to one event loop.

    A group leaves it *delivered* (into a collection) or *dropped* (anything else, whether its
    prompt is sampled again or not). Ages are optimizer steps; one below 0, a group of a version
    that is not published everywhere yet, counts as 0.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._delivered = _Flow()
        self._dropped = _Flow()
        self._ages: list[int] = []
        self._rejected: dict[RejectReason, int] = dict.fromkeys(_REASONS, 0)
        self._aborted = 0
        self._stale = 0
        self._waited_s = 0.0

    def delivered(self, group: SampleGroup, age: int | None) -> None:
        """``group`` went into a collection at ``age``."""
        self._delivered.add(group, age)
        if age is not None:
            self._ages.append(max(0, age))

    def dropped(self, group: SampleGroup, age: int | None) -> None:
        """``group`` left the queue for anything but a collection; None when its age is unknown."""
        self._dropped.add(group, age)

    def rejected(self, reason: RejectReason) -> None:
        """A group was refused for the version(s) that sampled it or for missing samples."""
        self._rejected[reason] += 1

    def aborted(self) -> None:
        """A group was given back because it was cancelled before it was finished."""
        self._aborted += 1

    def stale(self) -> None:
        """A finished group was older than its limit."""
        self._stale += 1

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
        metrics: dict[str, float] = {
            f"{PREFIX}queue_size": float(size),
            f"{PREFIX}aborted_groups_filtered": float(self._aborted),
            f"{PREFIX}stale_groups_filtered": float(self._stale),
            f"{PREFIX}avg_staleness": _mean(self._ages),
            f"{PREFIX}max_staleness": float(max(self._ages, default=0)),
            f"{PREFIX}buffer_avg_staleness": _mean(waiting),
            f"{PREFIX}buffer_max_staleness": float(max(waiting, default=0)),
            **{f"{PREFIX}rejected_{name}_groups": float(n) for name, n in self._rejected.items()},
            f"{QUEUE_PREFIX}consumer_wait_seconds": self._waited_s,
        }
        dropped, delivered = self._dropped.counts(), self._delivered.counts()
        for name, lost in dropped.items():
            metrics[f"{QUEUE_PREFIX}dropped_{name}"] = float(lost)
            metrics[f"{QUEUE_PREFIX}delivered_{name}"] = float(delivered[name])
            fraction = lost / max(1, lost + delivered[name])
            metrics[f"{QUEUE_PREFIX}dropped_{_fraction_name(name)}"] = fraction
        self._reset()
        return metrics


class _Flow:
    """Groups, samples and response tokens that left the queue one way."""

    def __init__(self) -> None:
        self._groups = 0
        self._samples = 0
        self._tokens = 0
        self._by_length = dict.fromkeys(LENGTH_BINS, 0)
        self._by_age = dict.fromkeys((*AGE_BINS, UNKNOWN_AGE), 0)

    def add(self, group: SampleGroup, age: int | None) -> None:
        self._groups += 1
        self._samples += len(group.samples)
        self._tokens += group.response_tokens
        self._by_age[age_bin(age)] += len(group.samples)
        for sample in group.samples:
            self._by_length[length_bin(len(sample.response_token_ids))] += 1

    def counts(self) -> dict[str, int]:
        """The counts by the part of their name that follows ``dropped_`` and ``delivered_``."""
        return {
            "groups": self._groups,
            "samples": self._samples,
            "response_tokens": self._tokens,
            **{f"samples_by_length/{name}": count for name, count in self._by_length.items()},
            **{f"samples_by_age/{name}": count for name, count in self._by_age.items()},
        }


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
