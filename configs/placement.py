"""``[placement]``: which GPUs the trainer and the engines take."""

from typing import Literal

from pydantic import Field

from configs.section import Section


class PlacementSection(Section):
    """``[placement]``."""

    mode: Literal["cpu", "colocated", "disaggregated"] = "cpu"
    """Where trainer and engines compute: on no GPU (cpu), in turns on the same GPUs (colocated:
    engines give their memory back while the trainer steps), or each on GPUs of its own
    (disaggregated). The native engine knows cpu, and colocated to take turns with main memory."""
    gpus_per_node: int | None = Field(default=None, ge=1)
    """GPUs of every machine of the cluster; default: what the run needs, 8 at most."""
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    """Memory of one GPU in GiB; with it a run that cannot fit is refused before it starts."""
