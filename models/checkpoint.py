"""Checkpoints: resumable trainer state plus data position under one completion marker."""

from pydantic import Field

from models.base import Carried, Frozen
from models.ids import RunRef
from models.inside import InnerPath


class CheckpointRequest(Frozen):
    """Commit a checkpoint after update ``update`` (all collections up to it are consumed)."""

    run: RunRef
    epoch: int
    update: int
    policy_version: int


class PolicyClock(Carried):
    """Counters of a checkpoint. -1 <= published <= completed; next_rollout_id >= 0."""

    completed_steps: int
    """Optimizer steps, equal to the policy version."""
    published_step: int
    next_rollout_id: int
    """The first update that a resumed run performs."""


class CheckpointFile(Carried):
    """One file under a marker."""

    path: InnerPath
    """Relative to the checkpoint's folder."""
    sha256: str
    num_bytes: int


class CheckpointMarker(Carried):
    """``complete.json``: written last; a folder without a valid one does not exist."""

    schema_version: int = 2
    run_id: str
    spec_sha256: str
    epoch: int
    clock: PolicyClock
    cursor_sha256: str
    files: tuple[CheckpointFile, ...]
    """Every file of the folder except the marker, the cursor included."""
    created_unix: float
    metrics: dict[str, float] = Field(default_factory=dict)


class CheckpointRef(Carried):
    """A committed checkpoint."""

    update: int
    """The last update that it contains; -1 is the initial state, never written."""
    policy_version: int
    folder: str
    """Relative to the output root, e.g. ``checkpoints/core/rollout_0000004.e1u4a1``."""
    marker_sha256: str
    seconds: float = 0.0


class RewindRequest(Carried):
    """Go back to the checkpoint after ``updates`` finished updates, whatever was done since."""

    updates: int
    reason: str = ""


class Rewind(Carried):
    """A rewind that was decided: the content of its record, which undoes what it names."""

    schema_version: int = 1
    epoch: int
    """Claimed for it: what older epochs did at update ``updates`` or later does not count."""
    updates: int
    """Finished updates that stay; the next one has this index."""
    undone_updates: int
    """Finished updates that were set aside."""
    checkpoint: CheckpointRef
    reason: str = ""
    workflow_run_id: str = ""
    """Temporal's run id of the execution that asked for it; its retries find it by this."""
    time_unix: float = 0.0


class Fork(Carried):
    """Where a forked run comes from: ``fork.json`` under its root."""

    schema_version: int = 1
    run_id: str
    """The new run."""
    spec_sha256: str
    identity_sha256: str
    updates: int
    """Finished updates that it began with, all of them the source's."""
    policy_version: int
    epoch: int
    """The source's newest epoch; those of the new run are above it."""
    source_run_id: str
    source_root: str
    source_spec_sha256: str
    source_checkpoint: CheckpointRef
    host: str = ""
    time_unix: float = 0.0
