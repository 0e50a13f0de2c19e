"""Which policy version sampled each token of a collection, and how old that makes it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import ContractViolation
from models.sample import Sample, SampleGroup


@dataclass(frozen=True, slots=True, order=True)
class BehaviorVersion:
    """A behavior version and the sample that carries it, for messages."""

    version: int
    where: str


@dataclass(frozen=True, slots=True)
class TokenVersions:
    """Behavior versions of a collection's S samples and N response tokens, in their order."""

    sampled_by: Tensor  # [N] int64, the version that sampled the token
    replay: Tensor  # [N] int64, the version that sampled the last token of the same response
    oldest: BehaviorVersion
    newest: BehaviorVersion
    mixed: Tensor  # [S] bool, whether more than one version sampled the response

    @classmethod
    def of(cls, groups: Sequence[SampleGroup]) -> "TokenVersions":
        """Of groups whose samples have valid provenance."""
        rows: list[tuple[int, int, int]] = []
        met: list[BehaviorVersion] = []
        mixed: list[bool] = []
        for group in groups:
            for sample in group.samples:
                for span in sample.spans:
                    rows.append((span.version, sample.replay_version, span.end - span.start))
                    met.append(BehaviorVersion(span.version, place(group, sample)))
                mixed.append(sample.is_mixed)
        sampled_by, replay, lengths = torch.tensor(rows, dtype=torch.long).reshape(-1, 3).unbind(1)
        return cls(
            sampled_by=sampled_by.repeat_interleave(lengths),
            replay=replay.repeat_interleave(lengths),
            oldest=min(met),
            newest=max(met),
            mixed=torch.tensor(mixed, dtype=torch.bool),
        )

    def lag(self, policy_version: int, limit: int) -> int:
        """Lag of the oldest token, in optimizer steps.

        Args:
            policy_version: completed optimizer steps, now.
            limit: the largest lag that the next optimizer step may train on.

        Raises:
            ContractViolation: a token of a version that does not exist yet, or a token too old.
        """
        from_the_future = self.newest.version > policy_version
        met = self.newest if from_the_future else self.oldest
        lag = policy_version - met.version
        if from_the_future or lag > limit:
            raise ContractViolation(
                f"{met.where}: a token was sampled by version {met.version}, the trainer is at "
                f"version {policy_version}: lag {lag} is outside 0..{limit}, which is "
                "core.max_policy_lag less the optimizer steps that follow in this update"
            )
        return lag


def place(group: SampleGroup, sample: Sample) -> str:
    """Names a sample in messages."""
    return f"prompt group {group.group_index}, sample {sample.sample_index}"
