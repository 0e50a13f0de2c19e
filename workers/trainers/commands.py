"""What the ranks of a trainer do together: one command at a time, with its arguments.

Every rank runs the same command and ends it in the same way: with a result, or with one error.
"""

from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeVar

from pydantic import Field, TypeAdapter

from activities.rollout.collection_file import read_collection
from activities.storage.store import Store
from models.base import Frozen
from models.checkpoint import CheckpointFile, PolicyClock
from models.evaluation import ExportReport
from models.publication import WeightBucket, WeightsRef
from models.rollout import RolloutCollection
from models.update import UpdateReport
from workers.trainers.export import ExportProbe
from workers.trainers.local import LocalTrainer
from workers.trainers.ranks import agreed, concluded

T_co = TypeVar("T_co", covariant=True)


class Command(Protocol[T_co]):
    """One command."""

    def run(self, trainer: LocalTrainer, store: Store) -> T_co:
        """Do it on this rank. Raises what it raises on every rank."""

    def model_dump_json(self) -> str:
        """What another process reads with ``COMMANDS``."""


class Optimize(Frozen):
    """Apply an update. Every rank reads the collection itself."""

    name: Literal["optimize"] = "optimize"
    update: int
    collection: RolloutCollection

    def run(self, trainer: LocalTrainer, store: Store) -> UpdateReport:
        """See ``LocalTrainer.optimize``."""
        with concluded(trainer.ranks):
            with agreed(trainer.ranks):
                groups = read_collection(store, self.collection)
            return trainer.optimize(self.update, self.collection.sha256, groups)


class ExportWeights(Frozen):
    """Write the weights for engines into a new folder of this host."""

    name: Literal["export_weights"] = "export_weights"
    version: int
    folder: str

    def run(self, trainer: LocalTrainer, store: Store) -> WeightsRef:
        """See ``LocalTrainer.export_weights``."""
        with concluded(trainer.ranks):
            return trainer.export_weights(self.version, Path(self.folder))


class OfferWeights(Frozen):
    """Describe the weights for engines that take them in buckets."""

    name: Literal["offer_weights"] = "offer_weights"
    version: int

    def run(self, trainer: LocalTrainer, store: Store) -> WeightsRef:
        """See ``LocalTrainer.offer_weights``."""
        with concluded(trainer.ranks):
            return trainer.offer_weights(self.version)


class CopyWeights(Frozen):
    """Copy the weights to the first rank's host."""

    name: Literal["copy_weights"] = "copy_weights"
    version: int

    def run(self, trainer: LocalTrainer, store: Store) -> None:
        """See ``WeightsCopy.take``."""
        with concluded(trainer.ranks):
            trainer.require_version(self.version)
            trainer.copy.take()


class PackBucket(Frozen):
    """Fill one bucket on every rank."""

    name: Literal["pack_bucket"] = "pack_bucket"
    version: int
    index: int

    def run(self, trainer: LocalTrainer, store: Store) -> WeightBucket:
        """See ``WeightSender.pack``."""
        with concluded(trainer.ranks):
            trainer.require_version(self.version)
            return trainer.sender.pack(self.version, self.index)


class DropBucket(Frozen):
    """Give up the bucket on every rank."""

    name: Literal["drop_bucket"] = "drop_bucket"

    def run(self, trainer: LocalTrainer, store: Store) -> None:
        """See ``WeightSender.drop``."""
        with concluded(trainer.ranks):
            trainer.sender.drop()


class Save(Frozen):
    """Write a checkpoint into a folder of this host."""

    name: Literal["save"] = "save"
    folder: str

    def run(self, trainer: LocalTrainer, store: Store) -> tuple[CheckpointFile, ...]:
        """See ``LocalTrainer.save``."""
        with concluded(trainer.ranks):
            return trainer.save(Path(self.folder))


class Load(Frozen):
    """Restore a checkpoint from a folder of this host."""

    name: Literal["load"] = "load"
    folder: str
    clock: PolicyClock

    def run(self, trainer: LocalTrainer, store: Store) -> None:
        """See ``LocalTrainer.load``."""
        with concluded(trainer.ranks):
            trainer.load(Path(self.folder), self.clock)


class ExportModel(Frozen):
    """Write the final Hugging Face folder on this host."""

    name: Literal["export_model"] = "export_model"
    folder: str
    probe: ExportProbe
    uri: str

    def run(self, trainer: LocalTrainer, store: Store) -> ExportReport:
        """See ``LocalTrainer.export_hf``."""
        with concluded(trainer.ranks):
            return trainer.export_hf(Path(self.folder), self.probe, self.uri)


AnyCommand = (
    Optimize
    | ExportWeights
    | OfferWeights
    | CopyWeights
    | PackBucket
    | DropBucket
    | Save
    | Load
    | ExportModel
)

COMMANDS: TypeAdapter[AnyCommand] = TypeAdapter(
    Annotated[AnyCommand, Field(discriminator="name")],
)
"""Reads any command from JSON."""
