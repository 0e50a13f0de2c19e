"""The loss of one optimizer step, called with a slice of its response tokens at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import NonFiniteLoss
from workers.trainers.batch import TrainingBatch
from workers.trainers.loss import LossSettings, SequenceTerms, importance_weights, token_loss
from workers.trainers.packing import MicroBatch
from workers.trainers.tally import UpdateTally


@dataclass(slots=True)
class UpdateTokens:
    """The N response tokens of one update on the trainer's device."""

    batch: TrainingBatch
    members: tuple[int, ...]
    """This rank's samples of the collection."""
    behavior: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    active: Tensor  # [N] bool
    all_active: bool
    sample: Tensor  # [N] int64, index into the batch's samples
    old: Tensor  # [N] the trainer's log-probs before the update; NaN where not scored or masked
    reference: Tensor  # [N] log-probs of the frozen model; NaN where not scored

    @classmethod
    def of(
        cls,
        batch: TrainingBatch,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        members: Sequence[int] | None = None,
    ) -> "UpdateTokens":
        """Nothing scored yet. ``dtype`` is that of log-probs; ``members`` are all by default."""
        unscored = torch.full((batch.num_tokens,), float("nan"), device=device, dtype=dtype)
        samples = torch.arange(len(batch.samples)).repeat_interleave(batch.lengths)
        return cls(
            batch=batch,
            members=tuple(range(len(batch.samples)) if members is None else members),
            behavior=batch.behavior.to(device, dtype),
            advantages=batch.advantages.to(device, dtype),
            active=batch.active.to(device),
            all_active=bool(batch.active.all()),
            sample=samples.to(device),
            old=unscored,
            reference=unscored.clone(),
        )

    def covered_by(self, micros: Sequence[MicroBatch]) -> Tensor:
        """[N] bool: the tokens of ``micros``."""
        covered = torch.zeros_like(self.active)
        for micro in micros:
            covered[micro.token_index.to(covered.device)] = True
        return covered

    def refuse_non_finite(self, logprobs: Tensor, scored: Tensor, what: str) -> None:
        """Raise on the first token of ``scored`` [N] bool without a finite log-prob.

        Raises:
            NonFiniteLoss: names the sample, the token and ``what`` (whose log-prob it is).
        """
        bad = (scored & self.active & ~logprobs.isfinite()).nonzero()
        if len(bad):
            token = int(bad[0])
            raise NonFiniteLoss(
                f"{self.batch.locate(token)}: {what} is {float(logprobs[token])}; the optimizer "
                "step was not taken"
            )


class StepLoss:
    """Sums of one optimizer step; a ``ChunkLoss`` for ``Scorer.backward``.

    Fills ``tokens.old`` where it is still NaN: there the forward of this step supplies it.
    """

    def __init__(
        self, tokens: UpdateTokens, weights: Tensor, settings: LossSettings, tally: UpdateTally
    ) -> None:
        """``weights``: [N] share of each token in the step's loss."""
        self._tokens = tokens
        self._weights = weights.to(tokens.old.device, tokens.old.dtype)
        self._settings = settings
        self._tally = tally
        self._new = torch.full_like(tokens.old, float("nan"))
        self._scored = torch.zeros_like(tokens.active)
        self._sequence = (torch.zeros_like(tokens.old), torch.ones_like(tokens.old))
        self._sums = torch.zeros(3, dtype=torch.float64, device=tokens.old.device)

    def __call__(self, new: Tensor, entropy: Tensor, index: Tensor) -> Tensor:
        """Weighted sum of the loss of tokens ``index`` [n]; masked ones have no part in it."""
        tokens = self._tokens
        if not tokens.all_active:
            keep = tokens.active[index]
            new, entropy, index = new[keep], entropy[keep], index[keep]
        self._scored.index_fill_(0, index, True)  # an assignment would wait for the GPU
        self._new[index] = new.detach()
        old = self._old(new.detach(), index)
        tokens.old[index] = old
        behavior = tokens.behavior[index]
        anchor = behavior if self._settings.behavior_anchor else old
        parts = token_loss(
            new,
            anchor,
            behavior,
            tokens.advantages[index],
            entropy,
            self._settings,
            reference=tokens.reference[index],
            sequence=self._terms(index),
        )
        self._tally.add(parts, new=new, anchor=anchor, old=old, behavior=behavior, entropy=entropy)
        weights = self._weights[index]
        loss = (parts.total * weights).sum()
        self._sums += torch.stack(
            [loss.detach(), (parts.policy.detach() * weights).sum(), (parts.kl * weights).sum()]
        )
        return loss

    @property
    def needs_look(self) -> bool:
        """Whether a micro-batch must be shown whole before its loss."""
        return self._settings.sequence_ratio

    def look(self, logprobs: Tensor, index: Tensor) -> None:
        """Note mean log-ratio and mean weight of every response of a micro-batch.

        Responses are whole in a micro-batch.
        """
        tokens, settings = self._tokens, self._settings
        sample, active = tokens.sample[index], tokens.active[index]
        old = self._old(logprobs, index)
        behavior = tokens.behavior[index]
        anchor = behavior if settings.behavior_anchor else old
        weight, _ = importance_weights(old, behavior, settings)
        weight = weight.clamp(settings.tis_clip_low, settings.tis_clip)
        counts = self._per_sample(sample, active.to(old.dtype))
        for place, values in enumerate((logprobs - anchor, weight)):
            sums = self._per_sample(sample, torch.where(active, values, 0.0))
            means = (sums / counts.clamp(min=1))[sample]
            known = self._sequence[place][index]
            means = torch.where(counts[sample] > 0, means, known.double())
            self._sequence[place][index] = means.to(known.dtype)

    def _per_sample(self, sample: Tensor, values: Tensor) -> Tensor:
        """[S] float64 sums of ``values`` [n] of the samples ``sample`` [n]."""
        sums = values.new_zeros(len(self._tokens.batch.samples), dtype=torch.float64)
        return sums.index_add_(0, sample, values.double())

    def finish(self) -> tuple[float, float, float]:
        """Total, policy part and KL part of the loss, as far as this rank has them.

        Raises:
            NonFiniteLoss: one of them, or a token's log-prob, is no finite number.
        """
        self._tokens.refuse_non_finite(self._new, self._scored, "the trainer's log-prob")
        total, policy, kl = self._sums.tolist()
        if not bool(self._sums.isfinite().all()):
            raise NonFiniteLoss(f"the loss is {total}; the optimizer step was not taken")
        return total, policy, kl

    def _old(self, new: Tensor, index: Tensor) -> Tensor:
        known = self._tokens.old[index]
        return torch.where(known.isnan(), new, known)

    def _terms(self, index: Tensor) -> SequenceTerms | None:
        if not self._settings.sequence_ratio:
            return None
        log_ratio, weight = self._sequence
        return SequenceTerms(log_ratio[index], weight[index])
