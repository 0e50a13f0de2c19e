"""What the stages of one producer share."""

from dataclasses import dataclass

from activities.fencing import FenceGuard
from activities.rollout.admission import AdmissionGate
from activities.rollout.committing import CollectionWriter
from activities.rollout.error_log import ErrorLog
from activities.rollout.recovery import ServingHealth
from activities.rollout.source import PromptSource
from activities.storage.store import Store
from activities.wire.engine_pool import EnginePool
from configs.run import RunSpec


@dataclass(frozen=True, slots=True)
class ProducerParts:
    """The parts of one producer that collections and evaluations both work with."""

    spec: RunSpec
    store: Store
    source: PromptSource
    pool: EnginePool
    gate: AdmissionGate
    """Of all training calls."""
    health: ServingHealth
    errors: ErrorLog
    epochs: FenceGuard
    """Orders calls by epoch alone: stages of different updates overlap."""
    writer: CollectionWriter
