"""What one optimizer step is divided by: counts of the whole step, over all ranks."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from configs.training import TrainingSection
from models.errors import ContractViolation
from workers.trainers.batch import TrainingBatch
from workers.trainers.loss import aggregation_weights
from workers.trainers.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Normalization:
    """Counts of one optimizer step, summed over ranks."""

    samples: int
    """Every sample of the step, those without a gradient included."""
    active_tokens: int
    """Response tokens in the loss that go through the model."""
    token_denominator: int
    """Sum of max(active tokens of a sample, 1) over all samples."""
    model_tokens: int
    """Tokens of prompts and responses that go through the model."""
    world_size: int
    documents: int
    """Samples that go through the model."""

    @classmethod
    def of(
        cls,
        batch: TrainingBatch,
        members: Sequence[int],
        scored: Sequence[int],
        model_tokens: int,
        ranks: Ranks,
    ) -> "Normalization":
        """Sum one rank's counts over all ranks.

        Args:
            batch: the collection.
            members: this rank's samples of the step.
            scored: those of them that go through the model.
            model_tokens: tokens of this rank's micro-batches.
            ranks: who else counts.
        """
        counts = batch.active_counts
        own = torch.tensor(
            [
                len(members),
                int(counts[list(scored)].sum()),
                int(counts[list(members)].clamp(min=1).sum()),
                model_tokens,
                len(scored),
            ],
            dtype=torch.long,
        )
        samples, active, denominator, tokens, documents = map(int, ranks.all_reduce_sum(own))
        return cls(samples, active, denominator, tokens, ranks.world, documents)

    def check(self, expected_samples: int, step: int) -> None:
        """Refuse counts that cannot be those of optimizer step ``step`` (1-based).

        Raises:
            ContractViolation: names the count; the same on every rank.
        """
        where = f"optimizer step {step}"
        if self.samples != expected_samples:
            raise ContractViolation(
                f"{where}: {self.samples} samples over {self.world_size} ranks, "
                f"training.global_batch_size is {expected_samples}"
            )
        if self.active_tokens <= 0:
            raise ContractViolation(
                f"{where}: no active token: loss_mask leaves out every response token of its "
                f"{self.samples} samples"
            )
        if self.model_tokens < self.active_tokens:
            raise ContractViolation(
                f"{where}: {self.model_tokens} model tokens are fewer than the "
                f"{self.active_tokens} active response tokens among them"
            )

    def weights(self, batch: TrainingBatch, section: TrainingSection) -> Tensor:
        """[N] float64: the share of each response token in the loss of the step."""
        per_sample = aggregation_weights(
            batch.active_counts,
            section.loss_aggregation,
            num_samples=self.samples,
            num_tokens=self.token_denominator,
        )
        return per_sample.repeat_interleave(batch.lengths)

    def as_event(self) -> dict[str, int]:
        """The counts as the contract file has them; ``documents`` stands beside the losses."""
        counts = asdict(self)
        del counts["documents"]
        return counts
