"""What is known of an update's tokens before any weight changes, and the checks on it.

score             scoring pass where one is needed, or due as a check
compare           scoring check, events, agreement guard: before the first forward of the training,
                  or after the only step's backward where that supplies the log-probs
score_reference   log-probs of the reference
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from configs.run import RunSpec
from workers.trainers.agreement import AgreementGuard
from workers.trainers.contract_file import ContractFile
from workers.trainers.logprobs import Scorer
from workers.trainers.loss import LossSettings
from workers.trainers.packing import MicroBatch
from workers.trainers.ranks import Ranks, SingleRank, agreed
from workers.trainers.refresh_scores import REFRESH_SCORES, refresh_metrics, refresh_scores
from workers.trainers.score_profile import SCORES, score_metrics, score_profile
from workers.trainers.scoring import (
    CHECKED,
    SCORE_TIMING,
    SCORING_CHECK,
    SKIPPED,
    STANDALONE,
    TRAINING_FORWARD,
    ScoringDecision,
    refuse_scoring_gap,
    score_into,
    scoring_check,
)
from workers.trainers.step_loss import UpdateTokens

_ROWS = "dynamic"
"""One computation, compiled or not, serves rows of every length."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """One optimizer step on one rank."""

    members: tuple[int, ...]
    """This rank's samples; all of them count in the denominators."""
    scored: tuple[int, ...]
    """Those of them that go through the model."""
    micros: list[MicroBatch]

    @property
    def num_packs(self) -> int:
        """Micro-batches that hold samples."""
        return sum(not micro.is_filler for micro in self.micros)

    @property
    def model_tokens(self) -> int:
        """Tokens of prompts and responses of the micro-batches."""
        return sum(micro.num_model_tokens for micro in self.micros)


@dataclass(frozen=True, slots=True)
class Judge:
    """What scores and compares; the same for every update of a trainer."""

    spec: RunSpec
    settings: LossSettings
    ranks: Ranks
    contract: ContractFile
    scorer: Scorer
    reference: Scorer | None
    decision: ScoringDecision
    guard: AgreementGuard

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        model_config: Any,
        ranks: Ranks,
        contract: ContractFile,
        scorer: Scorer,
        reference: Scorer | None,
    ) -> "Judge":
        """For the run ``spec`` and a model with the transformers configuration ``model_config``."""
        limit = spec.core.max_train_rollout_logprob_abs_diff
        return cls(
            spec=spec,
            settings=LossSettings.of(spec),
            ranks=ranks,
            contract=contract,
            scorer=scorer,
            reference=reference,
            decision=ScoringDecision(spec, model_config),
            guard=AgreementGuard(limit, spec.inference, ranks),
        )

    def append(self, event: str, values: dict[str, Any]) -> None:
        """Append an event to this rank's contract file; no rank goes on when one cannot."""
        self.append_all({event: values})

    def append_all(self, events: Mapping[str, dict[str, Any]]) -> None:
        """Append several events, in their order, and agree once."""
        with agreed(self.ranks):
            for event, values in events.items():
                self.contract.append(event, values)


class UpdateScores:
    """The scores of one update."""

    def __init__(
        self,
        judge: Judge,
        tokens: UpdateTokens,
        works: Sequence[StepWork],
        *,
        rollout_id: int,
        policy_version: int,
    ) -> None:
        """``works``: the optimizer steps that are taken; ``policy_version``: before the first."""
        self._judge = judge
        self._tokens = tokens
        self._micros = [micro for work in works for micro in work.micros]
        self._rollout_id = rollout_id
        self._policy_version = policy_version
        self._checks = judge.decision.check_due(policy_version)
        self._to_check: Tensor | None = None  # [N] log-probs of a pass that is a check
        self.standalone = judge.decision.plan.standalone
        """Whether a scoring pass supplies the log-probs before the update, not the training."""
        self.has_pass = self.standalone or self._checks
        """Whether there is a scoring pass, for whichever of both."""

    @property
    def scoring_pass(self) -> str:
        """What an ``optimizer`` event says of the update's scoring pass."""
        if self.standalone:
            return STANDALONE
        return CHECKED if self._checks else SKIPPED

    def score(self) -> None:
        """The scoring pass, if there is one."""
        if not self.has_pass:
            return
        tokens, judge = self._tokens, self._judge
        started = time.perf_counter()
        scores = torch.full_like(tokens.old, float("nan"))
        model_tokens = score_into(scores, judge.scorer, self._micros)
        if self._checks:
            self._to_check = scores
            return
        self._refuse_non_finite(scores, "the scoring pass's log-prob")
        tokens.old = torch.where(tokens.active, scores, tokens.old)
        timing = {
            "rollout_id": self._rollout_id,
            "seconds": time.perf_counter() - started,
            "model_tokens": model_tokens,
            "row_specialization": _ROWS,
        }
        judge.append(SCORE_TIMING, timing)

    def score_reference(self) -> None:
        """Log-probs of the reference, where the loss has a KL term."""
        tokens, judge = self._tokens, self._judge
        if judge.reference is None:
            return
        score_into(tokens.reference, judge.reference, self._micros)
        self._refuse_non_finite(tokens.reference, "the reference's log-prob")

    def compare(self) -> dict[str, float]:
        """Checks and events on the whole collection's scores, before the first weight changes.

        A kill after an event repeats the whole update and so the event, which readers of the file
        expect; a disk without room leaves the trainer as it was.

        Raises:
            PolicyDisagreement: scoring pass and training forward, or trainer and engines, disagree.
            NonFiniteLoss: a log-prob of the scoring pass is no finite number.
            ContractViolation: no token counts in the loss.
        """
        judge, tokens, rollout_id = self._judge, self._tokens, self._rollout_id
        if self._to_check is not None:
            self._refuse_non_finite(self._to_check, "the scoring pass's log-prob")
            check = scoring_check(
                self._to_check,
                tokens.old,
                judge.ranks,
                rollout_id=rollout_id,
                tolerance=judge.spec.core.scoring_check_tolerance,
            )
            judge.append(SCORING_CHECK, check)
            refuse_scoring_gap(check)
            judge.decision.checked()
        metrics = record_refresh(judge, tokens, rollout_id, self._policy_version)
        source = STANDALONE if self.standalone else TRAINING_FORWARD
        profile = score_profile(
            tokens.batch, tokens.old, judge.ranks, rollout_id=rollout_id, source=source
        )
        judge.append(SCORES, profile)
        judge.guard.check(
            tokens.batch,
            tokens.old,
            judge.scorer,
            self._micros,
            self._policy_version,
        )
        return metrics | score_metrics(profile)

    def _refuse_non_finite(self, logprobs: Tensor, what: str) -> None:
        """Raise on every rank when an active token of the update has no finite log-prob."""
        with agreed(self._judge.ranks):
            scored = self._tokens.covered_by(self._micros)
            self._tokens.refuse_non_finite(logprobs, scored, what)


def record_refresh(
    judge: Judge, tokens: UpdateTokens, rollout_id: int, policy_version: int
) -> dict[str, float]:
    """Append this rank's ``refresh_scores`` event where policies change under live requests.

    Returns:
        The same numbers over all ranks.
    """
    if judge.spec.core.publication_mode != "refresh":
        return {}
    own, whole = (
        refresh_scores(
            tokens.batch,
            tokens.members,
            tokens.old,
            judge.settings,
            ranks,
            rollout_id=rollout_id,
            policy_version=policy_version,
        )
        for ranks in (SingleRank(), judge.ranks)
    )
    judge.append(REFRESH_SCORES, own)
    return refresh_metrics(whole)
