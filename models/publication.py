"""Publication: making a policy version live on every engine, confirmed."""

from pydantic import Field

from models.base import Carried, Frozen
from models.ids import RunRef


class WeightsRef(Carried):
    """Exported weights of one policy version on this host's shared memory or disk."""

    version: int
    path: str
    """A folder that holds ``model.safetensors`` under Hugging Face names."""
    digest: str
    """SHA-256 over the sorted lines ``<Hugging Face name> <xxh3_64 hex of its bytes>\\n``.

    The same lines follow from an engine's ``/weights_checker`` checksums of its live tensors."""
    num_tensors: int
    num_bytes: int
    dtype: str


class PublishRequest(Frozen):
    """Make ``version`` live on every engine of the run."""

    run: RunRef
    epoch: int
    update: int
    version: int


class EngineConfirmation(Frozen):
    """One engine's answer: it serves this version and its live tensors hash to this digest."""

    engine: str
    version: int
    digest: str
    seconds: float


class EngineFailure(Frozen):
    """An engine that did not take new weights and was replaced for it."""

    engine: str
    incarnation: int
    phase: str
    """Where in the update it failed: drain, wake, inspect, pause, load, verify or resume."""
    error: str


class PublicationReport(Frozen):
    """Written to ``publication.jsonl`` as well."""

    version: int
    digest: str
    repeated_version: bool
    """The version was live already; nothing was moved."""
    engines: tuple[EngineConfirmation, ...]
    replaced: tuple[EngineFailure, ...] = ()
    mode: str = "barrier"
    boundary_seconds: float = 0.0
    """Healing and closing the producer's boundary."""
    export_seconds: float
    memory_seconds: float = 0.0
    """Colocated engines taking their memory back."""
    pause_seconds: float
    """Looking at what engines serve, draining and pausing them."""
    load_seconds: float
    """Loading and verifying."""
    finalize_seconds: float = 0.0
    """Resuming engines, routing, opening the boundary."""
    total_seconds: float
    num_bytes: int
    num_tensors: int
    metrics: dict[str, float] = Field(default_factory=dict)
