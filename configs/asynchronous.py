"""``[async]``: a producer that samples without being asked, while the trainer works."""

from typing import Literal

from pydantic import Field

from configs.section import Section


class AsyncSection(Section):
    """``[async]``."""

    fully_async: bool = False
    """Sample freely into a queue of finished groups while the trainer works."""
    async_max_concurrent_samples: int | None = Field(default=None, ge=1)
    """Samples that are generated or scored at once, rounded down to whole groups; default: the
    larger of one collection and two waves of serving slots, rounded up to whole groups."""
    async_data_buffer_capacity_factor: float = Field(default=2.0, gt=0)
    """Finished groups that may wait for the trainer, in collections."""
    async_unused_samples_handler: Literal["retry", "drop"] = "retry"
    """What becomes of a finished group that is too old: its prompt is sampled again, or dropped."""
    rollout_submission_granularity: Literal["sample", "group"] = "sample"
    """When the next group is submitted: as soon as samples leave room, or when a group is done."""
    max_requeues: int | None = Field(default=None, ge=1)
    """Times that a prompt may go stale before it is dropped; default: any number of times."""
