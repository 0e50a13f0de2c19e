"""Samples inside a process: the hot path between engine, verifier and trainer.

Plain slotted dataclasses, because an update creates thousands of them. What crosses Temporal is a
``RolloutCollection`` reference, never a sample.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from models.timing import AttemptTimes


class FinishReason(StrEnum):
    """Why an engine stopped a response."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class VerdictOutcome(StrEnum):
    """The three reward outcomes; they are never mixed up."""

    SCORE = "score"
    INVALID = "invalid"
    """The answer could not be read (no number, no tag): counts as a score of 0."""
    ERROR = "error"
    """The verifier itself failed: the sample has no reward."""


@dataclass(slots=True, frozen=True)
class TokenSpan:
    """Response tokens [start, end) that one policy version sampled (the behavior version)."""

    version: int
    start: int
    end: int


@dataclass(slots=True, frozen=True)
class Verdict:
    """A verifier's full answer."""

    name: str
    outcome: VerdictOutcome
    score: float
    """In [0, 1] for SCORE, 0.0 for INVALID, NaN for ERROR."""
    weight: float = 1.0
    detail: str = ""
    diagnostics: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class PrefixUse:
    """Input of the calls that made a response: the prompt, and what a call went on from."""

    input_tokens: int
    cached_tokens: int
    """Those that the engine had in its prefix cache."""


@dataclass(slots=True)
class Sample:
    """One response. T = number of response tokens."""

    sample_index: int
    group_index: int
    prompt_token_ids: list[int]
    response_token_ids: list[int]  # [T], stop token included
    logprobs: list[float]  # [T], log softmax(logits / temperature) at sampling time
    spans: list[TokenSpan]  # contiguous, cover [0, T)
    finish_reason: FinishReason
    text: str = ""
    reward: float = float("nan")
    verdicts: list[Verdict] = field(default_factory=list)
    loss_mask: list[int] | None = None
    """[T] of 0 and 1: the tokens that count in the loss; none: all of them."""
    routed_experts: bytes | None = None
    """int32 [prompt + T - 1, layers, top_k] in C order, of the forward that made the last token."""
    prefix_use: PrefixUse | None = None
    """None when no engine told; not part of the committed file."""

    @property
    def replay_version(self) -> int:
        """The version of the forward that made the last token, and so the route table."""
        return self.spans[-1].version

    @property
    def is_mixed(self) -> bool:
        """Whether more than one policy version sampled it."""
        return self.spans[0].version != self.spans[-1].version

    @property
    def oldest_version(self) -> int:
        """The oldest behavior version of any token."""
        return min(span.version for span in self.spans)


@dataclass(slots=True)
class SampleGroup:
    """The sibling samples of one prompt: the unit of retry and of the advantage."""

    group_index: int
    prepared_sample_id: str
    epoch_id: int
    samples: list[Sample]
    advantages: list[float] = field(default_factory=list)
    times: AttemptTimes | None = None
    """When it was sampled, if anybody measured."""

    @property
    def rewards(self) -> list[float]:
        """Rewards in sibling order."""
        return [sample.reward for sample in self.samples]

    @property
    def oldest_version(self) -> int:
        """The oldest behavior version of any token of any sample."""
        return min(sample.oldest_version for sample in self.samples)

    @property
    def versions(self) -> set[int]:
        """Every behavior version of any token."""
        return {span.version for sample in self.samples for span in sample.spans}

    @property
    def response_tokens(self) -> int:
        """Response tokens of all samples."""
        return sum(len(sample.response_token_ids) for sample in self.samples)
