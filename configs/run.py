"""The whole run file."""

from typing import Literal

from pydantic import Field

from configs.core import CoreSection
from configs.data import DataSection
from configs.evaluation import EvaluationSection
from configs.inference import InferenceSection
from configs.launch import LaunchSection, OutputSection, TrackingSection
from configs.model import ModelSection
from configs.section import Section
from configs.trainer import TrainerSection
from configs.training import OptimizerSection, TrainingSection


class RunSpec(Section):
    """A run, resolved: defaults < TOML < ``--set``."""

    schema_version: Literal[1]
    """Version of this schema."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120)
    """Name of the run; the Temporal workflow id is ``train/<name>``."""
    model: ModelSection
    data: DataSection
    output: OutputSection
    training: TrainingSection = TrainingSection()
    optimizer: OptimizerSection = OptimizerSection()
    core: CoreSection = CoreSection()
    trainer: TrainerSection = TrainerSection()
    inference: InferenceSection = InferenceSection()
    evaluation: EvaluationSection = EvaluationSection()
    launch: LaunchSection = LaunchSection()
    tracking: TrackingSection = TrackingSection()

    @property
    def run_id(self) -> str:
        """The Temporal workflow id."""
        return f"train/{self.name}"

    @property
    def samples_per_collection(self) -> int:
        """Samples that one update consumes."""
        return self.training.rollout_batch_size * self.training.samples_per_prompt

    @property
    def steps_per_update(self) -> int:
        """Optimizer steps per collection (K)."""
        batch = self.training.global_batch_size or self.samples_per_collection
        return self.samples_per_collection // batch

    @property
    def overlaps(self) -> bool:
        """Whether the next collection is sampled while the trainer works.

        Its first optimizer step is K steps ahead of the sampling policy, its last one 2K - 1.
        """
        return self.core.max_policy_lag >= 2 * self.steps_per_update - 1

    @property
    def uses_tis(self) -> bool:
        """Whether importance weights correct the behavior policy."""
        if self.training.use_tis is not None:
            return self.training.use_tis
        return self.overlaps or self.inference.dtype != self.trainer.compute_dtype
