"""The activities of background evaluation as Temporal knows them."""

from collections.abc import Callable, Sequence
from typing import Any

from temporalio import activity

from activities.background import evaluate_snapshot as evaluating
from activities.background import submit
from activities.background.experiments import Experiments, TemporalExperiments
from activities.background.snapshot import snapshot
from activities.failures import translated
from activities.heartbeat import beating
from activities.multiplier import infra_timeout_multiplier
from activities.site import Site
from activities.tokens import token_of
from models.background import (
    BackgroundOrder,
    EvaluationClaim,
    EvaluationFailure,
    SnapshotRef,
    SnapshotRequest,
    SubmissionRecord,
    SubmitRequest,
)
from models.evaluation import EvaluationReport
from models.ports import OpenEvaluator


class BackgroundActivities:
    """Snapshots and submissions of runs, and the evaluations themselves.

    ``code_sha256`` goes into receipts; ``experiments`` is a seam for tests.
    """

    def __init__(
        self,
        site: Site,
        open_evaluator: OpenEvaluator,
        code_sha256: str,
        experiments: Experiments | None = None,
    ) -> None:
        self._site = site
        self._open_evaluator = open_evaluator
        self._code_sha256 = code_sha256
        self._experiments = experiments or TemporalExperiments()

    @activity.defn
    async def snapshot(self, request: SnapshotRequest) -> SnapshotRef:
        """See ``background.snapshot``."""
        attempt = activity.info().attempt
        with translated(attempt):
            return await snapshot(self._site, request, token_of(request, attempt))

    @activity.defn
    async def submit_evaluation(self, request: SubmitRequest) -> EvaluationClaim:
        """See ``background.submit``."""
        with translated(activity.info().attempt):
            call = submit.submit_evaluation(
                request, self._experiments, self._code_sha256, infra_timeout_multiplier()
            )
            return await beating(call, f"submit evaluation {request.snapshot.update}")

    @activity.defn
    async def record_submission(self, request: SubmissionRecord) -> None:
        """See ``background.submit``."""
        with translated(activity.info().attempt):
            call = submit.record_submission(request, self._code_sha256)
            await beating(call, "record submission")

    @activity.defn
    async def await_evaluation(self, order: BackgroundOrder) -> None:
        """See ``background.evaluate_snapshot``."""
        with translated(activity.info().attempt):
            await evaluating.await_evaluation(order, self._experiments)

    @activity.defn
    async def evaluate_snapshot(self, order: BackgroundOrder) -> EvaluationReport:
        """See ``background.evaluate_snapshot``."""
        with translated(activity.info().attempt):
            return await evaluating.evaluate_snapshot(self._site, self._open_evaluator, order)

    @activity.defn
    async def record_evaluation(self, failure: EvaluationFailure) -> None:
        """See ``background.evaluate_snapshot``."""
        with translated(activity.info().attempt):
            await beating(evaluating.record_evaluation(failure), "record evaluation")

    def all(self) -> Sequence[Callable[..., Any]]:
        """What a worker registers."""
        return [
            self.snapshot,
            self.submit_evaluation,
            self.record_submission,
            self.await_evaluation,
            self.evaluate_snapshot,
            self.record_evaluation,
        ]
