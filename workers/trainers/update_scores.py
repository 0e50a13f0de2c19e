"""What is known of an update's tokens before any weight changes, and the checks on it.

prepare     scoring pass where one is needed, or due as a check; reference log-probs
compare     after the first step's backward: scoring check, events, agreement guard
"""

import time
from collections.abc import Sequence
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
    SCORE_TIMING,
    SCORING_CHECK,
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
        with agreed(self.ranks):
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
        self._works = works
        self._micros = [micro for work in works for micro in work.micros]
        self._rollout_id = rollout_id
        self._policy_version = policy_version
        self.checks = judge.decision.check_due(policy_version)
        begin = {"all": 0, "later_steps": 1, "nothing": len(works)}[judge.decision.plan.covers]
        self._needed = [micro for work in works[begin:] for micro in work.micros]
        self._passes = begin < len(works)
        self.scores = self.checks or self._passes
        """Whether anything is scored before the first training forward; alike on all ranks."""
        self._standalone: Tensor | None = None

    def prepare(self) -> None:
        """Score what must be scored before the first backward."""
        tokens, judge = self._tokens, self._judge
        if self._passes:
            self._score(self._needed)
        if self.checks:
            self._standalone = torch.full_like(tokens.old, float("nan"))
            score_into(self._standalone, judge.scorer, self._works[0].micros)
        if judge.reference is not None:
            score_into(tokens.reference, judge.reference, self._micros)
            with agreed(judge.ranks):
                scored = tokens.covered_by(self._micros)
                tokens.refuse_non_finite(tokens.reference, scored, "the reference's log-prob")

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
        if self._standalone is not None:
            with agreed(judge.ranks):
                scored = tokens.covered_by(self._works[0].micros)
                tokens.refuse_non_finite(self._standalone, scored, "the scoring pass's log-prob")
            check = scoring_check(
                self._standalone,
                tokens.old,
                judge.ranks,
                rollout_id=rollout_id,
                tolerance=judge.spec.core.scoring_check_tolerance,
            )
            judge.append(SCORING_CHECK, check)
            refuse_scoring_gap(check)
            judge.decision.checked()
        metrics = record_refresh(judge, tokens, rollout_id, self._policy_version)
        profile = score_profile(
            tokens.batch, tokens.old, judge.ranks, rollout_id=rollout_id, source=self._source()
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

    def _score(self, micros: Sequence[MicroBatch]) -> None:
        """The scoring pass of the update."""
        tokens, judge = self._tokens, self._judge
        started = time.perf_counter()
        scores = torch.full_like(tokens.old, float("nan"))
        model_tokens = score_into(scores, judge.scorer, micros)
        with agreed(judge.ranks):
            tokens.refuse_non_finite(scores, tokens.covered_by(micros), "the trainer's log-prob")
        tokens.old = torch.where(tokens.active, scores, tokens.old)
        timing = {
            "rollout_id": self._rollout_id,
            "seconds": time.perf_counter() - started,
            "model_tokens": model_tokens,
            "row_specialization": _ROWS,
        }
        judge.append(SCORE_TIMING, timing)

    def _source(self) -> str:
        covers = self._judge.decision.plan.covers
        if covers == "all":
            return "standalone"
        return "mixed" if covers == "later_steps" and len(self._works) > 1 else "training_forward"


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
