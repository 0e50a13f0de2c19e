"""What a fully async run has under way, as its producer last wrote it under the output root."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from activities.storage import layout
from models.run import RunProgress
from workers.cli import artifacts

READ_S = 2.0
"""Newest rows are read this often while a run is followed."""
OLD_S = 30.0
"""An older observation says its age."""

_STALE = "rollout/fully_async/stale_groups_filtered"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """None stands for what nobody observed."""

    publication_mode: str | None
    observed_unix: float | None
    """When the counts of groups were true."""
    queued_groups: int | None
    """Finished groups that wait for the trainer."""
    capacity_groups: int | None
    running_groups: int | None
    """Groups that are sampled or scored now."""
    blocked_groups: int | None
    """Finished groups that the queue has no room for."""
    requeued_groups: int | None
    """Group attempts that failed and were given back, since the producer's process started."""
    stale_groups: int | None
    """Finished groups that were too old for the last collection."""
    wait_seconds: float | None
    """How long the last collection waited for its groups."""


def read_pipeline(root: str, since_unix: float = 0.0) -> Pipeline:
    """Read the newest rows, none from before ``since_unix``: a former start wrote those. Blocks."""
    config = artifacts.read_json(root, layout.RESOLVED_CONFIG)
    core = config.get("core", {}) if isinstance(config, dict) else {}
    held = artifacts.last_row(root, layout.PIPELINE_OCCUPANCY)
    if held.get("time_unix", 0.0) < since_unix:
        held = {}
    flow = artifacts.last_row(root, layout.ROLLOUT_FLOW) if held else {}
    owned, blocked = held.get("producer_owned_groups"), _blocked(held)
    return Pipeline(
        publication_mode=core.get("publication_mode"),
        observed_unix=held.get("time_unix"),
        queued_groups=held.get("completed_queue_groups"),
        capacity_groups=held.get("completed_queue_capacity_groups"),
        running_groups=None if owned is None else owned - (blocked or 0),
        blocked_groups=blocked,
        requeued_groups=held.get("errors/requeued_groups"),
        stale_groups=_whole(flow.get("queue_metrics", {}).get(_STALE)),
        wait_seconds=flow.get("collection_wait_seconds"),
    )


class PipelineWatch:
    """Reads in the background while a run is followed: a slow disk never holds up the display."""

    def __init__(self) -> None:
        self._newest: Pipeline | None = None
        self._reading: asyncio.Task[Pipeline] | None = None
        self._due = 0.0

    def newest(self, progress: RunProgress | None) -> Pipeline | None:
        """What was read last; None for a run that does not sample by itself yet, and at first."""
        if progress is None or progress.run is None or not samples_freely(progress):
            return self._newest
        if self._reading is not None and self._reading.done():
            self._newest, self._reading = self._reading.result(), None
        if self._reading is None and time.monotonic() >= self._due:
            self._due = time.monotonic() + READ_S
            since_unix = progress.training_started_unix or 0.0
            reading = asyncio.to_thread(read_pipeline, progress.run.root, since_unix)
            self._reading = asyncio.ensure_future(reading)
        return self._newest


def is_fully_async(progress: RunProgress) -> bool:
    """Whether the producer of this run samples by itself."""
    return progress.plan is not None and progress.plan.fully_async


def samples_freely(progress: RunProgress) -> bool:
    """Whether that producer has begun; before, the newest rows are of a former start."""
    return is_fully_async(progress) and progress.training_started_unix is not None


def queue_text(pipeline: Pipeline) -> str:
    """Finished groups of what may wait, ``8/16``; empty when nobody observed."""
    if pipeline.queued_groups is None:
        return ""
    return f"{pipeline.queued_groups}/{_number(pipeline.capacity_groups)}"


def queue_detail(pipeline: Pipeline, now: float) -> str:
    """What stands behind the queue. ``now`` is wall-clock time in seconds."""
    text = f"groups ready, {_number(pipeline.running_groups)} under way"
    if pipeline.blocked_groups:
        text += f", {pipeline.blocked_groups} more wait for room"
    if pipeline.publication_mode:
        text += f" ({pipeline.publication_mode})"
    if pipeline.requeued_groups:
        text += f", {pipeline.requeued_groups} requeued"
    age_s = now - (pipeline.observed_unix or now)
    return f"{text}, {age_s:.0f} s ago" if age_s > OLD_S else text


def wait_detail(pipeline: Pipeline) -> str:
    """What stands behind the wait for the last collection."""
    text = "for the groups of the last collection"
    if pipeline.stale_groups:
        text += f", {pipeline.stale_groups} too old"
    return text


def _blocked(held: Mapping[str, Any]) -> int | None:
    groups: int | None = held.get("producer_ready", {}).get("groups")
    return groups


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
