"""A row of ``pipeline_occupancy.jsonl``: what a fully async producer holds at one moment."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from models.sample import SampleGroup


@dataclass(frozen=True, slots=True)
class Held:
    """Finished groups in one place, with their samples and response tokens."""

    groups: int
    samples: int
    response_tokens: int

    @classmethod
    def of(cls, groups: Iterable[SampleGroup]) -> "Held":
        """Count ``groups``."""
        held = list(groups)
        return cls(
            groups=len(held),
            samples=sum(len(group.samples) for group in held),
            response_tokens=sum(group.response_tokens for group in held),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """One snapshot. None says that a value does not exist in this run, which 0 would not."""

    completed_queue: Held | None
    """Groups that wait for the trainer."""
    producer_ready: Held | None
    """Finished groups that are not in the queue yet."""
    shutdown_unqueued: Held | None
    """Finished groups that the end of the producer kept out of the queue."""
    completed_put_wait_seconds: float
    """Seconds that finished groups waited for room in the queue, since the process started."""
    completed_put_current_wait_seconds: float
    """Length of the wait that goes on now, else 0."""
    producer_owned_groups: int
    """Groups that were drawn and are not in the queue yet."""
    producer_active_group_tasks: int
    producer_admission_open: bool
    """Whether the producer may begin new groups."""
    producer_unfinished_samples: int | None
    """Samples in the making; None when submission is by whole groups."""
    completed_queue_groups: int | None
    completed_queue_capacity_groups: int | None
    generation_admission_paused: bool | None
    """Whether the gate of generation calls is closed."""
    generation_admission_waiters: int | None
    """Calls that wait for it to open; the engines do not know of them."""
    generation_active_calls: int | None
    http_capacity_requests: int | None
    http_active_requests: int | None
    """Capacity less free permits."""
    http_waiting_requests: int | None
    errors: Mapping[str, float]
    """The ``errors/`` metrics of the serving health."""

    def row(self) -> dict[str, Any]:
        """The snapshot under its names in the file, ``errors/`` metrics beside the others."""
        values = {name: getattr(self, name) for name in _NAMES}
        for name in _PLACES:
            held: Held | None = values[name]
            values[name] = None if held is None else _counts(held)
        return {**values, **self.errors}


_NAMES = tuple(field.name for field in fields(Occupancy) if field.name != "errors")
_PLACES = ("completed_queue", "producer_ready", "shutdown_unqueued")
GAUGES = tuple(
    name for name in _NAMES if name not in _PLACES and not name.startswith("completed_put_")
)
"""Keys whose value is one number that holds at that moment."""

OCCUPANCY_KEYS = (
    "time_unix",
    *_NAMES,
    "errors/elapsed_seconds",
    "errors/completed_group_attempts",
    "errors/requeued_groups",
    "errors/window_group_attempts",
    "errors/window_failed_groups",
    "errors/failure_fraction_5m",
    "errors/high_failure_seconds",
    "errors/transport_groups",
    "errors/overload_groups",
    "errors/unavailable_groups",
    "errors/timeout_groups",
)
"""Every key of a row of ``pipeline_occupancy.jsonl``."""


def _counts(held: Held) -> dict[str, int]:
    return {name: getattr(held, name) for name in ("groups", "samples", "response_tokens")}
