"""How long the siblings of a prompt group take, and how long the quick ones wait for the slowest.

A group is delivered whole, so its slowest sample decides; the others are retained until then.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self

from activities.storage import layout
from models.errors import GenerationFault
from models.sample import SampleGroup
from models.timing import AttemptTimes, SampleTimes

Clock = Callable[[], float]
Put = Callable[[str, Mapping[str, Any]], None]

CONSUMED = "rollout/siblings/consumed/"


class AttemptClock:
    """Times one attempt; a context manager around it. Writes its row at the end, however it ends.

    ``put`` takes the row and its file; None measures without writing. The clocks, wall and
    monotonic, are in seconds.
    """

    def __init__(
        self,
        group_index: int,
        put: Put | None = None,
        *,
        wall: Clock = time.time,
        monotonic: Clock = time.monotonic,
    ) -> None:
        self._group_index = group_index
        self._put = put
        self._wall = wall
        self._monotonic = monotonic
        self._attempt = uuid.uuid4().hex
        self._samples: dict[int, SampleTimes] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._put is None:
            return
        times = self.times()
        row = {
            "schema_version": 1,
            "group_attempt": self._attempt,
            "group_index": self._group_index,
            "outcome": _outcome(error),
            "group_finished_unix": self._wall(),
            "group_finished_monotonic": self._monotonic(),
            "samples": [asdict(sample) for sample in times.samples],
            "summary": sibling_summary(times),
        }
        self._put(layout.sibling_timing(self._attempt), row)

    @contextmanager
    def sample(self, sample_index: int) -> Iterator[None]:
        """Time one sibling, from asking for a slot to its last token."""
        started = SampleTimes(sample_index, self._wall(), self._monotonic())
        self._samples[sample_index] = started
        yield
        self._samples[sample_index] = replace(
            started, finished_unix=self._wall(), finished_monotonic=self._monotonic()
        )

    def times(self) -> AttemptTimes:
        """What was measured so far."""
        return AttemptTimes(
            self._attempt, tuple(self._samples[index] for index in sorted(self._samples))
        )


def sibling_summary(times: AttemptTimes) -> dict[str, float]:
    """Durations of an attempt in seconds; those of no finished sample are left out.

    With b_i and e_i begin and end of the finished samples: ``group_seconds`` = max e - min b,
    ``sample_seconds_mean`` and ``_max`` of e_i - b_i, ``retained_seconds`` = sum of (max e - e_i),
    what finished samples waited for the slowest.
    """
    spans = [
        (sample.started_monotonic, sample.finished_monotonic)
        for sample in times.samples
        if sample.finished_monotonic is not None
    ]
    summary: dict[str, float] = {"samples": len(times.samples), "finished_samples": len(spans)}
    if not spans:
        return summary
    seconds = [end - begin for begin, end in spans]
    last = max(end for _, end in spans)
    return {
        **summary,
        "group_seconds": last - min(begin for begin, _ in spans),
        "sample_seconds_mean": sum(seconds) / len(seconds),
        "sample_seconds_max": max(seconds),
        "retained_seconds": sum(last - end for _, end in spans),
    }


def consumed_siblings(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """The ``rollout/siblings/consumed/`` metrics of a collection; none when nothing was measured.

    Means and maxima over its groups, and ``retained_fraction``: the share of the time between a
    sample's begin and its group's end that finished samples spent waiting for the slowest.
    """
    summaries = [sibling_summary(group.times) for group in groups if group.times is not None]
    summaries = [each for each in summaries if each["finished_samples"]]
    if not summaries:
        return {}
    count = len(summaries)
    busy = sum(each["sample_seconds_mean"] * each["finished_samples"] for each in summaries)
    retained = sum(each["retained_seconds"] for each in summaries)
    return {
        f"{CONSUMED}groups": float(count),
        f"{CONSUMED}group_seconds_mean": sum(each["group_seconds"] for each in summaries) / count,
        f"{CONSUMED}group_seconds_max": max(each["group_seconds"] for each in summaries),
        f"{CONSUMED}sample_seconds_max": max(each["sample_seconds_max"] for each in summaries),
        f"{CONSUMED}retained_seconds_mean": retained / count,
        f"{CONSUMED}retained_fraction": retained / (busy + retained) if busy + retained else 0.0,
    }


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "complete"
    if isinstance(error, asyncio.CancelledError):
        return "canceled"
    return error.category if isinstance(error, GenerationFault) else "failed"
