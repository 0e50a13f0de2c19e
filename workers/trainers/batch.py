"""A collection as the trainer sees it: flat response tokens, samples, optimizer steps.

All per-token vectors run over the response tokens of all samples, sample after sample:

    sample   s0 s0 s0 | s1 | s2 s2        lengths [3, 1, 2]   offsets [0, 3, 4]
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from activities.rollout.provenance import check_sample
from configs.run import RunSpec
from models.errors import ContractViolation, NonFiniteLoss
from models.sample import Sample, SampleGroup
from workers.trainers.documents import Document
from workers.trainers.packing import Response, Row
from workers.trainers.provenance import TokenVersions, place

_WHITENING_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One response with its place in the flat vectors."""

    group: int
    """Position of the group in the collection."""
    prompt_ids: list[int]
    response_ids: list[int]
    offset: int
    advantage: float
    where: str = ""
    """Names the sample in messages."""
    routes: bytes | None = None
    """Its expert routes, as the engine returned them."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One collection: S samples, N response tokens."""

    samples: tuple[TrainingSample, ...]
    behavior: Tensor  # [N] float32 log-probs at sampling time
    advantages: Tensor  # [N] float32
    active: Tensor  # [N] bool: the token counts in the loss
    active_counts: Tensor  # [S] int64: active tokens of each sample
    versions: TokenVersions
    num_groups: int
    num_mixed_groups: int
    """Groups whose samples were not all rewarded alike."""

    @classmethod
    def of(cls, groups: Sequence[SampleGroup]) -> "TrainingBatch":
        """Flatten groups in their order; refuse what cannot be trained on.

        Raises:
            ContractViolation: no samples, parts that do not fit together, tokens without a behavior
                version or a finite log-prob, or a group without advantages.
            NonFiniteLoss: an advantage that is not a finite number.
        """
        samples: list[TrainingSample] = []
        behavior: list[float] = []
        masks: list[Tensor] = []
        for position, group in enumerate(groups):
            if len(group.advantages) != len(group.samples):
                raise ContractViolation(
                    f"group {group.group_index}: {len(group.advantages)} advantages for "
                    f"{len(group.samples)} samples"
                )
            for sample, advantage in zip(group.samples, group.advantages, strict=True):
                _validate(group, sample, advantage)
                samples.append(
                    TrainingSample(
                        position,
                        sample.prompt_token_ids,
                        sample.response_token_ids,
                        len(behavior),
                        advantage,
                        place(group, sample),
                        sample.routed_experts,
                    )
                )
                behavior.extend(sample.logprobs)
                masks.append(_mask(sample))
        if not samples:
            raise ContractViolation("the collection holds no samples")
        lengths = torch.tensor([len(s.response_ids) for s in samples], dtype=torch.long)
        per_sample = torch.tensor([s.advantage for s in samples], dtype=torch.float32)
        return cls(
            samples=tuple(samples),
            behavior=torch.tensor(behavior, dtype=torch.float32),
            advantages=per_sample.repeat_interleave(lengths),
            active=torch.cat(masks),
            active_counts=torch.stack([mask.sum() for mask in masks]),
            versions=TokenVersions.of(groups),
            num_groups=len(groups),
            num_mixed_groups=len({s.group for s in samples if s.advantage != 0.0}),
        )

    @property
    def num_tokens(self) -> int:
        """Response tokens of all samples."""
        return len(self.behavior)

    @property
    def lengths(self) -> Tensor:
        """[S] response tokens of each sample, masked ones included."""
        return torch.tensor([len(s.response_ids) for s in self.samples], dtype=torch.long)

    def whitened(self) -> "TrainingBatch":
        """The same batch with advantages of mean 0 and variance 1 over its active tokens.

        The variance is the unbiased one; without any spread all advantages become 0.
        """
        values = torch.tensor([s.advantage for s in self.samples], dtype=torch.float64)
        counts = self.active_counts.double()
        if len(values[counts > 0].unique()) < 2:
            # what rounding leaves of equal values must not look like a gradient
            values = torch.zeros_like(values)
        total = counts.sum().clamp(min=1)
        centered = values - (values * counts).sum() / total
        variance = (centered.square() * counts).sum() / (total - 1).clamp(min=1)
        white = (centered * (variance + _WHITENING_EPSILON).rsqrt()).tolist()
        return replace(
            self,
            samples=tuple(
                replace(s, advantage=a) for s, a in zip(self.samples, white, strict=True)
            ),
            advantages=torch.tensor(white, dtype=torch.float32).repeat_interleave(self.lengths),
        )

    def locate(self, token: int) -> str:
        """Names the sample that holds flat response token ``token``, and its place in there."""
        index = bisect_right(self.samples, token, key=lambda sample: sample.offset) - 1
        sample = self.samples[index]
        return f"{sample.where}, response token {token - sample.offset}"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step: which samples count, which go through the model."""

    members: tuple[int, ...]
    """Every sample of the step; all of them count in the denominators."""
    active: tuple[int, ...]
    """The samples that go through the model: those that can have a gradient, with siblings."""

    def share(self, rank: int, world: int) -> "StepPlan":
        """The part of one rank: as many members as every other, in order.

        Raises:
            ContractViolation: the members cannot be dealt evenly.
        """
        size, rest = divmod(len(self.members), world)
        if rest:
            raise ContractViolation(
                f"{len(self.members)} samples of an optimizer step cannot be dealt to {world} ranks"
            )
        own = self.members[rank * size : (rank + 1) * size]
        kept = set(own).intersection(self.active)
        return StepPlan(own, tuple(m for m in own if m in kept))

    @property
    def has_signal(self) -> bool:
        """Whether the step has a policy gradient at all."""
        return bool(self.active)


def plan_steps(
    batch: TrainingBatch, num_steps: int, seed: int, *, keep_tied: bool
) -> list[StepPlan]:
    """Deal the samples to optimizer steps of equal size by a seeded permutation.

    Siblings of one step that all have advantage zero are left out of the model, which is exact
    unless the loss has a term without the advantage, or routers are to be counted (``keep_tied``).
    A step without any advantage at all is inactive either way: it would step on momentum alone.
    """
    size, rest = divmod(len(batch.samples), num_steps)
    if rest or not size:
        raise ContractViolation(
            f"{len(batch.samples)} samples cannot be dealt to {num_steps} optimizer steps evenly"
        )
    order = list(range(len(batch.samples)))
    if num_steps > 1:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(order), generator=generator).tolist()
    plans = []
    for start in range(0, len(order), size):
        members = sorted(order[start : start + size])
        mixed = {batch.samples[m].group for m in members if batch.samples[m].advantage != 0.0}
        everything = keep_tied and bool(mixed)
        active = [m for m in members if everything or batch.samples[m].group in mixed]
        plans.append(StepPlan(tuple(members), tuple(active)))
    return plans


def rows_of(batch: TrainingBatch, members: Sequence[int]) -> list[Row]:
    """One packed row per group for the given samples, in collection order."""
    siblings: dict[int, list[int]] = {}
    for member in members:
        siblings.setdefault(batch.samples[member].group, []).append(member)
    return [
        Row(
            batch.samples[group[0]].prompt_ids,
            tuple(Response(batch.samples[m].response_ids, batch.samples[m].offset) for m in group),
        )
        for group in siblings.values()
    ]


def documents_of(batch: TrainingBatch, members: Sequence[int]) -> list[Document]:
    """The given samples as documents, in their order."""
    samples = [batch.samples[member] for member in members]
    return [Document(s.prompt_ids, s.response_ids, s.offset, s.routes) for s in samples]


def update_seed(seed: int, update: int) -> int:
    """The seed of everything random in one update: a function of the run's seed and the index."""
    digest = hashlib.sha256(f"{seed}:{update}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _mask(sample: Sample) -> Tensor:
    """[tokens] bool: which tokens of a response count."""
    if sample.loss_mask is None:
        return torch.ones(len(sample.response_token_ids), dtype=torch.bool)
    return torch.tensor(sample.loss_mask, dtype=torch.bool)


def _validate(group: SampleGroup, sample: Sample, advantage: float) -> None:
    """Refuse a sample whose parts do not fit together."""
    # Again where it is consumed: a wrong version would be silent, the loss that of another policy.
    check_sample(sample)
    where = place(group, sample)
    if not sample.prompt_token_ids:
        raise ContractViolation(f"{where}: empty prompt")
    if sample.prompt_token_ids != group.samples[0].prompt_token_ids:
        raise ContractViolation(f"{where}: its prompt differs from its siblings' prompt")
    if not math.isfinite(advantage):
        raise NonFiniteLoss(f"{where}: advantage is {advantage}")


def accepted(spec: RunSpec, groups: Sequence[SampleGroup]) -> TrainingBatch:
    """The batch of one update.

    Raises:
        ContractViolation: it has more or fewer samples, or a longer one, than the run file says.
    """
    batch = TrainingBatch.of(groups)
    longest = spec.core.max_context_length
    for sample in batch.samples:
        tokens = len(sample.prompt_ids) + len(sample.response_ids)
        if tokens > longest:
            raise ContractViolation(
                f"{sample.where}: prompt_token_ids and response_token_ids hold {tokens} tokens "
                f"together, core.max_context_length is {longest}"
            )
    expected = spec.samples_per_collection
    if len(batch.samples) != expected:
        raise ContractViolation(
            f"the collection holds {len(batch.samples)} samples, "
            f"training.rollout_batch_size x training.samples_per_prompt is {expected}"
        )
    return batch.whitened() if spec.training.normalize_advantages else batch
