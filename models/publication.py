"""Publication: making a policy version live on every engine, confirmed."""

from typing import Literal, NamedTuple

from pydantic import Field

from models.base import Carried, Frozen
from models.ids import RunRef

Transport = Literal["disk", "ipc", "nccl"]
"""How weights travel: through a folder, as handles of memory that both sides see, by broadcast."""

ChecksumKind = Literal["xxh3_64", "fingerprint"]
"""Hash of one tensor's bytes: xxh3_64 on a CPU, ``workers.fingerprint`` where the tensor lies."""


CPU = "cpu"
"""Where weights lie on a machine without GPUs."""


class WeightsRef(Carried):
    """Weights of one policy version, in a folder of this host or in the trainer's memory."""

    version: int
    path: str
    """A folder that holds ``model.safetensors`` under Hugging Face names; empty: there is none."""
    digest: str
    """SHA-256 over the sorted lines ``<Hugging Face name> <16 hex digits of its bytes>\\n``.

    The same lines follow from an engine's ``/weights_checker`` checksums of its live tensors."""
    checksum: ChecksumKind = "xxh3_64"
    """What the hex digits are."""
    transport: Transport = "disk"
    """How engines take them: ``disk`` needs the folder only, the others the trainer's help."""
    num_buckets: int = 0
    """How many buckets the trainer sends them in."""
    num_tensors: int
    num_bytes: int
    dtype: str

    @property
    def on_disk(self) -> bool:
        """Whether an engine can load them without the trainer."""
        return bool(self.path)


class TensorMeta(NamedTuple):
    """A tensor in a bucket: its Hugging Face name, dtype as torch names it, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightBucket(Frozen):
    """Some tensors of one version, one after the other in one piece of memory."""

    version: int
    index: int
    """0-based, below ``WeightsRef.num_buckets``."""
    tensors: tuple[TensorMeta, ...]
    num_bytes: int
    handles: dict[str, str] = Field(default_factory=dict)
    """GPU as CUDA counts them on the host, or ``CPU`` -> base64 of a handle of the copy there.

    It lives until the next bucket is packed."""


class WeightsOffer(Frozen):
    """Weights that the trainer holds for engines."""

    weights: WeightsRef
    bucket: WeightBucket | None = None
    """The only bucket of the weights, packed; None where there are more, or a folder."""


class WeightChannel(Frozen):
    """A process group for broadcasts: rank 0 is the trainer, the others are engines' processes."""

    name: str
    address: str
    port: int
    """Where its members find each other."""
    world: int
    backend: str
    connected: bool = False
    """Every member has joined it already."""


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
    """From the first call to it; waiting for the trainer's offer and for other engines included."""


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
    transport: Transport = "disk"
    num_buckets: int = 1
    """Pieces that the weights travelled in; 1 for a folder."""
    boundary_seconds: float = 0.0
    """Healing and closing the producer's boundary."""
    export_seconds: float
    memory_seconds: float = 0.0
    """Colocated engines taking their memory back; beside the export of weights without files."""
    pause_seconds: float
    """Looking at what engines serve, draining and pausing them."""
    load_seconds: float
    """Loading and verifying."""
    finalize_seconds: float = 0.0
    """Resuming engines, routing, opening the boundary."""
    folder_seconds: float = 0.0
    """Copying to the host what a replaced engine would load."""
    total_seconds: float
    num_bytes: int
    num_tensors: int
    metrics: dict[str, float] = Field(default_factory=dict)
