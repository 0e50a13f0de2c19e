"""The optimizer update: request and report."""

from pydantic import Field

from models.base import Frozen
from models.ids import RunRef
from models.rollout import RolloutCollection


class OptimizeRequest(Frozen):
    """Train update ``update`` on one collection. Idempotent under (update, collection.sha256)."""

    run: RunRef
    epoch: int
    update: int
    collection: RolloutCollection


class UpdateReport(Frozen):
    """What the optimizer did. A retry of the same (update, digest) returns the same report."""

    update: int
    batch_sha256: str
    policy_version: int
    """Completed optimizer steps after this update."""
    optimizer_steps: int
    """Steps taken in this update; 0 when every group tied (``no_signal``)."""
    engines_released: bool = False
    """Colocated engines gave their memory, weights too, to the trainer: nothing can be sampled
    before a publication, of the same version if no step was taken."""
    no_signal: bool
    metrics: dict[str, float] = Field(default_factory=dict)
    """Every key is declared in ``models/metrics.py``."""
    seconds: float
    resident_bytes: int = 0
    """Resident memory of the trainer process after the update."""
