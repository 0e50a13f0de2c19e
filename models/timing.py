"""When the siblings of a prompt group were sampled: one attempt, on two clocks."""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class SampleTimes:
    """One sibling, from its first request to its last token; waiting for a slot included.

    The wall clock places it beside what other processes say, the monotonic one tells durations.
    Seconds; the end is None when the sibling did not finish.
    """

    sample_index: int
    started_unix: float
    started_monotonic: float
    finished_unix: float | None = None
    finished_monotonic: float | None = None


@dataclass(slots=True, frozen=True)
class AttemptTimes:
    """One attempt of a prompt group, siblings in their order."""

    group_attempt: str
    """A fresh uuid hex: a group that is sampled again has another one."""
    samples: tuple[SampleTimes, ...]
