"""The whole run file."""

from typing import Literal

from pydantic import ConfigDict, Field

from configs.asynchronous import AsyncSection
from configs.core import CoreSection
from configs.data import DataSection
from configs.evaluation import EvaluationSection
from configs.inference import InferenceSection
from configs.launch import LaunchSection, OutputSection, TrackingSection
from configs.model import ModelSection
from configs.placement import PlacementSection
from configs.section import Section
from configs.topology import Demand
from configs.trainer import TrainerSection
from configs.training import OptimizerSection, TrainingSection
from models.publication import Transport

ASYNC_POLICY_LAG = 6
"""Default of ``core.max_policy_lag`` in a fully async run, in optimizer steps."""


class RunSpec(Section):
    """A run, resolved: defaults < TOML < ``--set``."""

    model_config = ConfigDict(serialize_by_alias=True)

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
    asynchronous: AsyncSection = Field(default=AsyncSection(), alias="async")
    trainer: TrainerSection = TrainerSection()
    inference: InferenceSection = InferenceSection()
    placement: PlacementSection = PlacementSection()
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
    def samples_per_step(self) -> int:
        """Samples of one optimizer step."""
        return self.samples_per_collection // self.steps_per_update

    @property
    def has_routers(self) -> bool | None:
        """Whether the model is a mixture of experts; None when only its files can tell."""
        if self.model.source == "tiny":
            return self.model.tiny is not None and self.model.tiny.experts is not None
        return False if self.model.source.startswith("wheel:") else None

    @property
    def _has_kernel(self) -> bool:
        """Whether the trainer most likely has the attention kernel for documents."""
        trainer = self.trainer
        fast = trainer.compute_dtype == "bfloat16" and trainer.attention != "eager"
        return fast and self.gpu_demand is not None

    @property
    def packing(self) -> Literal["shared_prompt", "documents"] | None:
        """``trainer.packing`` or its default; None when only the model's files can tell."""
        if self.trainer.packing is not None:
            return self.trainer.packing
        if self.has_routers or self.training.use_rollout_routing_replay or self._has_kernel:
            return "documents"
        return None if self.has_routers is None else "shared_prompt"

    @property
    def longest_row(self) -> int:
        """Tokens that the longest sample takes in the trainer, as far as the run file tells.

        Documents are fed whole; a shared-prompt row leaves the last token of a response out.
        """
        return self.core.max_context_length - (self.packing != "documents")

    @property
    def lr_decay_steps(self) -> int:
        """``optimizer.lr_decay_steps`` or its default, the optimizer steps of the run."""
        given = self.optimizer.lr_decay_steps
        return given if given is not None else self.training.num_rollouts * self.steps_per_update

    @property
    def fully_async(self) -> bool:
        """Whether the producer samples freely into a queue while the trainer works."""
        return self.asynchronous.fully_async

    @property
    def max_policy_lag(self) -> int:
        """``core.max_policy_lag`` or its default, in optimizer steps."""
        given = self.core.max_policy_lag
        return given if given is not None else (ASYNC_POLICY_LAG if self.fully_async else 0)

    @property
    def max_group_age(self) -> int:
        """Oldest a group may be, in optimizer steps, at the first of the K steps that train it."""
        return self.max_policy_lag - (self.steps_per_update - 1)

    @property
    def overlaps(self) -> bool:
        """Whether the next collection is asked for while the trainer works on the current one.

        Its first optimizer step is K steps ahead of the sampling policy, its last one 2K - 1.
        A fully async producer is not asked: it samples by itself.
        """
        return not self.fully_async and self.max_policy_lag >= 2 * self.steps_per_update - 1

    @property
    def samples_while_training(self) -> bool:
        """Whether engines and trainer work at the same time and share the cores."""
        return self.fully_async or self.overlaps

    @property
    def colocated(self) -> bool:
        """Whether engines give their memory back while the trainer steps."""
        return self.placement.mode == "colocated"

    @property
    def publication_transport(self) -> Transport:
        """``core.publication_transport``, or what ``auto`` means for this run."""
        given = self.core.publication_transport
        if given != "auto":
            return given
        placed = self.inference.engine == "sglang" and self.placement.mode != "cpu"
        if not placed or self.core.publication_mode == "rolling":
            return "disk"
        return "ipc" if self.colocated else "nccl"

    @property
    def gpu_demand(self) -> Demand | None:
        """GPUs that the run takes; None when it takes none, as with the native engine."""
        if self.placement.mode == "cpu" or self.inference.engine == "native":
            return None
        parallel = self.inference.tensor_parallel_size
        return Demand(
            trainer=self.trainer.num_processes,
            rollout=self.inference.num_engines * parallel,
            tensor_parallel=parallel,
            colocated=self.colocated,
            given_capacity=self.placement.gpus_per_node,
        )

    @property
    def uses_tis(self) -> bool:
        """Whether importance weights correct the behavior policy."""
        if self.training.use_tis is not None:
            return self.training.use_tis
        if self.training.use_rollout_logprobs:
            return False
        return self.samples_while_training or self.inference.dtype != self.trainer.compute_dtype
