"""The guard on trainer and behavior policy: do both give the same tokens the same log-probs?

The guarded number is the mean over all active tokens of all ranks of |trainer before the update -
behavior|, in float64. When it is above the limit, known faults are tried on the batch itself: what
would the trainer's log-probs be if the engine had done this or that? The fault that leaves the
smallest gap is named.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.inference import InferenceSection
from models.errors import PolicyDisagreement
from workers.trainers.batch import TrainingBatch
from workers.trainers.logprobs import Scorer
from workers.trainers.packing import MicroBatch
from workers.trainers.ranks import Ranks

_EXPLAINED = 0.5  # of the gap may be left by a fault that counts as its likely cause
_ELEMENTS = 1 << 24  # of the logits that are looked at together: sorted ones take 12 bytes each

_LATE = "each log-prob is that of the token before (recorded one token late)"
_EARLY = "each log-prob is that of the token after (recorded one token early)"
_AGE = "policy age: tokens of the current version agree, tokens of older versions do not"


@dataclass(frozen=True, slots=True)
class Gap:
    """Absolute log-prob gaps of tokens, over all ranks."""

    mean: float
    """0 without tokens."""
    tokens: int
    largest: float


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that was tried: the mean gap over the same tokens if the engine had that fault."""

    fault: str
    remaining: float


def mean_gap(left: Tensor, right: Tensor, counted: Tensor, ranks: Ranks) -> Gap:
    """Gap of two scorings [N] over the tokens where ``counted`` [N] is true."""
    gap = (left[counted].double() - right[counted].double()).abs().cpu()
    own = torch.stack([gap.sum(), gap.new_tensor(len(gap))])
    total, count = ranks.all_reduce_sum(own).tolist()
    largest = gap.max() if len(gap) else torch.zeros((), dtype=torch.float64)
    return Gap(total / max(count, 1.0), int(count), float(ranks.all_reduce_max(largest)))


class AgreementGuard:
    """``core.max_train_rollout_logprob_abs_diff`` and what to say when it is exceeded."""

    def __init__(self, limit: float | None, inference: InferenceSection, ranks: Ranks) -> None:
        self._limit = limit
        self._inference = inference
        self._ranks = ranks

    def check(
        self,
        batch: TrainingBatch,
        old: Tensor,
        scorer: Scorer,
        micros: Sequence[MicroBatch],
        policy_version: int,
    ) -> None:
        """Compare before any weight changes.

        Args:
            batch: the collection, N response tokens.
            old: [N] the trainer's log-probs before the update; NaN where a token is not in the
                loss, which leaves it out.
            scorer: computes under the weights before the update.
            micros: this rank's micro-batches of the tokens in ``old``.
            policy_version: completed optimizer steps before the update.

        Raises:
            PolicyDisagreement: the mean is above the limit; names the likely cause.
        """
        if self._limit is None:
            return
        behavior = batch.behavior.to(old.device)
        gap = mean_gap(old, behavior, ~old.isnan(), self._ranks)
        if gap.mean <= self._limit:
            return
        findings = [
            *self._shifts(batch, old, behavior),
            *self._other_sampling(old, behavior, scorer, micros),
            *self._age(batch, old, behavior, policy_version),
        ]
        raise PolicyDisagreement(
            f"mean |trainer - engine| log-prob gap {gap.mean:.4g} over {gap.tokens} tokens exceeds "
            f"core.max_train_rollout_logprob_abs_diff = {self._limit:.4g} (largest "
            f"{gap.largest:.4g}); likely: {likely_cause(gap.mean, findings)}"
        )

    def _shifts(self, batch: TrainingBatch, old: Tensor, behavior: Tensor) -> list[Finding]:
        """Another token's log-prob in the place of each, inside every response."""
        sample = torch.arange(len(batch.samples)).repeat_interleave(batch.lengths).to(old.device)
        neighbors = (sample[1:] == sample[:-1]) & ~(old[1:].isnan() | old[:-1].isnan())
        late = mean_gap(old[:-1], behavior[1:], neighbors, self._ranks)
        early = mean_gap(old[1:], behavior[:-1], neighbors, self._ranks)
        if late.tokens == 0:
            return []
        return [Finding(_LATE, late.mean), Finding(_EARLY, early.mean)]

    def _other_sampling(
        self, old: Tensor, behavior: Tensor, scorer: Scorer, micros: Sequence[MicroBatch]
    ) -> list[Finding]:
        """The engine's log-probs after, or without, a step of its sampling."""
        section = self._inference
        tempered = section.temperature != 1.0
        truncates = section.top_p < 1.0 or section.top_k > 0
        faults: list[tuple[str, float, bool]] = []
        if tempered:
            dropped = f"the engine's log-probs lack inference.temperature = {section.temperature:g}"
            twice = f"the engine divides by inference.temperature = {section.temperature:g} twice"
            faults += [(dropped, 1.0, False), (twice, section.temperature**2, False)]
        if truncates:
            cut = (
                "the engine's log-probs are renormalized after inference.top_p = "
                f"{section.top_p:g}, top_k = {section.top_k}"
            )
            faults.append((cut, section.temperature, True))
            if tempered:
                faults.append((f"{cut}, and lack the temperature", 1.0, True))
        if not faults:
            return []
        rescored = [torch.full_like(old, float("nan")) for _ in faults]
        for logits, targets, index in _slices(scorer, micros):
            for target, (_, temperature, cut_off) in zip(rescored, faults, strict=True):
                found = self._logprobs(logits, targets, temperature, cut_off)
                target[index] = found.to(old.dtype)
        seen = ~old.isnan()
        return [
            Finding(fault, mean_gap(values, behavior, seen, self._ranks).mean)
            for (fault, *_), values in zip(faults, rescored, strict=True)
        ]

    def _logprobs(
        self, logits: Tensor, targets: Tensor, temperature: float, cut_off: bool
    ) -> Tensor:
        """Log-probs [n] at ``temperature``, of the full or of the truncated distribution."""
        log_p = torch.log_softmax(logits.float() / temperature, -1)
        own = log_p.gather(-1, targets[:, None])[:, 0]
        if not cut_off:
            return own
        top_k = self._inference.top_k if self._inference.top_k > 0 else log_p.shape[-1]
        ranked = log_p.topk(min(top_k, log_p.shape[-1]), -1).values.exp()
        kept = (ranked.cumsum(-1) - ranked) < self._inference.top_p
        # the engine sampled the token, so rounding may not leave it out
        mass = torch.maximum((ranked * kept).sum(-1), own.exp())
        return own - mass.log()

    def _age(
        self, batch: TrainingBatch, old: Tensor, behavior: Tensor, policy_version: int
    ) -> list[Finding]:
        """Whether the tokens that the current policy sampled agree."""
        current = (batch.versions.sampled_by == policy_version).to(old.device)
        seen = ~old.isnan()
        newest = mean_gap(old, behavior, seen & current, self._ranks)
        older = mean_gap(old, behavior, seen & ~current, self._ranks)
        if newest.tokens == 0 or older.tokens == 0:
            return []
        return [Finding(_AGE, newest.mean)]


def _slices(
    scorer: Scorer, micros: Sequence[MicroBatch]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Few rows at a time of (logits [n, V], targets [n], token index [n])."""
    for micro in micros:
        for chunk in scorer.logits(micro):
            rows = max(1, _ELEMENTS // chunk[0].shape[-1])
            yield from zip(*(part.split(rows) for part in chunk), strict=True)


def likely_cause(mean: float, findings: Sequence[Finding]) -> str:
    """The fault that explains most of a mean gap, with what else was tried."""
    ranked = sorted(findings, key=lambda finding: finding.remaining)
    tried = "; ".join(f"{finding.fault}: {finding.remaining:.3g}" for finding in ranked)
    if ranked and ranked[0].remaining <= _EXPLAINED * mean:
        others = "; ".join(f"{f.fault}: {f.remaining:.3g}" for f in ranked[1:])
        best = f"{ranked[0].fault}; the gap would be {ranked[0].remaining:.3g}"
        return f"{best} (also tried: {others})" if others else best
    unknown = (
        "weights of another version or model, or different dtypes and kernels if the gap is small"
    )
    return f"{unknown} (tried without success: {tried})" if tried else unknown
