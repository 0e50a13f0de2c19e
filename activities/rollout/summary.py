"""Counts and metrics of finished groups: what a collection and an evaluation report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from activities.rollout.filters import has_mixed_rewards, tied_reward
from activities.rollout.sample_metrics import sample_metrics
from models.metrics import refuse_undeclared
from models.rollout import CollectionCounts
from models.sample import FinishReason, Sample, SampleGroup, VerdictOutcome


@dataclass(slots=True)
class SampledTally:
    """Everything sampled for a collection, dropped groups included."""

    reward_sum: float = 0.0
    scored_samples: int = 0
    error_samples: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Drop reason -> groups."""
    faults: dict[str, int] = field(default_factory=dict)
    """Fault category -> group attempts."""
    groups: int = 0
    tied: dict[str, int] = field(default_factory=dict)
    """Reward, rounded to one decimal -> groups in which every sample has it."""

    def add(self, group: SampleGroup, drop_reason: str | None) -> None:
        """Count a finished group."""
        self.groups += 1
        tied = tied_reward(group.rewards)
        if tied is not None:
            self.tied[tied] = self.tied.get(tied, 0) + 1
        for sample in group.samples:
            if math.isfinite(sample.reward):
                self.reward_sum += sample.reward
                self.scored_samples += 1
            else:
                self.error_samples += 1
        if drop_reason is not None:
            self.dropped[drop_reason] = self.dropped.get(drop_reason, 0) + 1

    def add_fault(self, category: str) -> None:
        """Count a failed group attempt."""
        self.faults[category] = self.faults.get(category, 0) + 1

    def merge(self, other: "SampledTally") -> None:
        """Add what ``other`` counted."""
        self.reward_sum += other.reward_sum
        self.scored_samples += other.scored_samples
        self.error_samples += other.error_samples
        self.groups += other.groups
        for mine, theirs in (
            (self.dropped, other.dropped),
            (self.faults, other.faults),
            (self.tied, other.tied),
        ):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count

    @property
    def reward_mean(self) -> float:
        """Mean reward of all samples with a score.

        Filtered groups count: without them the mean would be that of the undecided prompts only.
        """
        return self.reward_sum / self.scored_samples if self.scored_samples else math.nan

    def tie_metrics(self) -> dict[str, float]:
        """``rollout/zero_std/``: the share of groups without a gradient, and their rewards.

        Filtered groups count: without them a run that filters would show none.
        """
        return {
            "rollout/zero_std/ratio": sum(self.tied.values()) / max(1, self.groups),
            **{f"rollout/zero_std/count_{reward}": n for reward, n in self.tied.items()},
        }


def collection_counts(groups: Sequence[SampleGroup], tally: SampledTally) -> CollectionCounts:
    """Counts over the kept groups, with what was dropped and retried on the way."""
    samples = [sample for group in groups for sample in group.samples]
    return CollectionCounts(
        groups=len(groups),
        samples=len(samples),
        prompt_tokens=sum(len(sample.prompt_token_ids) for sample in samples),
        response_tokens=sum(len(sample.response_token_ids) for sample in samples),
        truncated_samples=sum(is_truncated(sample) for sample in samples),
        invalid_verdicts=count_verdicts(samples, VerdictOutcome.INVALID),
        mixed_reward_groups=sum(has_mixed_rewards(group.rewards) for group in groups),
        filtered_groups=dict(sorted(tally.dropped.items())),
        failed_attempts=dict(sorted(tally.faults.items())),
    )


def collection_metrics(
    update: int,
    groups: Sequence[SampleGroup],
    counts: CollectionCounts,
    tally: SampledTally,
    max_requeues: int,
    seconds: float,
    num_devices: int,
    queue_metrics: Mapping[str, float],
) -> dict[str, float]:
    """The ``rollout/`` and ``perf/`` metrics of a collection; every name is declared.

    ``num_devices`` are the GPUs of all engines. Reads every text: nothing for an event loop.
    """
    samples = [sample for group in groups for sample in group.samples]
    tokens_per_second = counts.response_tokens / max(seconds, 1e-9)
    metrics: dict[str, float] = {
        "rollout/step": update,
        "rollout/reward": tally.reward_mean,
        "rollout/truncated_ratio": counts.truncated_samples / counts.samples,
        "rollout/mixed_reward_groups": counts.mixed_reward_groups,
        "rollout/error_verdicts": tally.error_samples,
        "rollout/invalid_verdicts": counts.invalid_verdicts,
        "rollout/requeued_groups": sum(tally.faults.values()),
        "rollout/seconds": seconds,
        "rollout/response_tokens_per_second": tokens_per_second,
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": tokens_per_second / num_devices,
        "rollout/max_requeues": max_requeues,
        **{f"rollout/dynamic_filter/drop_{name}": n for name, n in tally.dropped.items()},
        **sample_metrics(samples),
        **tally.tie_metrics(),
        **queue_metrics,
    }
    refuse_undeclared(metrics)
    return metrics


def is_truncated(sample: Sample) -> bool:
    """Whether the response was cut at the token limit."""
    return sample.finish_reason is FinishReason.LENGTH


def count_verdicts(samples: Sequence[Sample], outcome: VerdictOutcome) -> int:
    """Samples with at least one verdict of this outcome."""
    return sum(any(each.outcome is outcome for each in sample.verdicts) for sample in samples)
