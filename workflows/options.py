"""Queues and the one table of stages: result type, time-outs, attempts of every activity.

Why the numbers are what they are:

- ``start_to_close`` bounds one attempt and is scaled by the infrastructure multiplier; the
  heartbeat time-out is not, because it says how fast a dead worker is noticed.
- Attempts are bounded everywhere. A worker that dies costs one attempt (a heartbeat time-out), and
  so does an engine or Ray that does not answer; 30 attempts at most 5 s apart outlast a worker
  that crash-loops for four minutes and end a call that can never succeed. Time without any worker
  costs none: there is no schedule-to-start limit.
- ``schedule_to_close`` bounds all attempts together where a call may hang inside a live actor: 30
  attempts of ten minutes would be five hours. It counts time without a worker as well, but its end
  is answered by a rebuild, which waits for one and keeps whatever lives.
- ``drains``: a cancelled run lets these calls finish, because they move state that would be
  thrown away otherwise and they end soon; the others are cancelled and joined.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Generic, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy

from activities.queues import CONTROL_QUEUE, fleet_queue
from models.background import (
    BackgroundOrder,
    EvaluationClaim,
    EvaluationFailure,
    SnapshotRef,
    SnapshotRequest,
    SubmissionRecord,
    SubmitRequest,
)
from models.checkpoint import CheckpointRef, CheckpointRequest
from models.errors import fatal_type_names
from models.evaluation import EvaluateRequest, EvaluationReport, ExportReport, ExportRequest
from models.publication import PublicationReport, PublishRequest
from models.retraining import DecideRequest, Firing, FiringRequest, RetrainingOutcome
from models.rollout import CollectRequest, RolloutCollection
from models.run import (
    ClaimResult,
    LoopPlan,
    PrepareReport,
    PrepareRequest,
    RecordRequest,
    RevokeRequest,
    RunRequest,
)
from models.update import OptimizeRequest, UpdateReport

__all__ = ["CONTROL_QUEUE", "STAGES", "Stage", "fleet_queue"]

PAYLOAD_TOO_LARGE = "PayloadsTooLarge"
"""Temporal's failure type for a result over 2 MiB; retryable unless said otherwise."""

_HOUR_S = 3600.0
_UNPLANNED = LoopPlan(num_rollouts=1)

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Stage(Generic[Request, Result]):
    """One activity: its name, types and limits."""

    name: str
    request: type[Request]
    result: type[Result]
    start_to_close_s: float
    max_attempts: int = 30
    drains: bool = False
    schedule_to_close_s: float | None = None

    def config(self, plan: LoopPlan | None, summary: str) -> workflow.ActivityConfig:
        """Arguments of ``workflow.start_activity``; ``summary`` is the label in the Web UI."""
        plan = plan or _UNPLANNED
        factor, total_s = plan.infra_timeout_multiplier, self.schedule_to_close_s
        return workflow.ActivityConfig(
            start_to_close_timeout=timedelta(seconds=self.start_to_close_s * factor),
            schedule_to_close_timeout=timedelta(seconds=total_s * factor) if total_s else None,
            heartbeat_timeout=timedelta(seconds=plan.heartbeat_timeout_s),
            retry_policy=RetryPolicy(
                initial_interval=timedelta(seconds=0.5),
                maximum_interval=timedelta(seconds=5),
                maximum_attempts=self.max_attempts,
                non_retryable_error_types=[*fatal_type_names(), PAYLOAD_TOO_LARGE],
            ),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            summary=summary,
        )


def publish_stage(plan: LoopPlan) -> Stage[PublishRequest, PublicationReport]:
    """``PUBLISH`` with the limits of ``plan``: a rolling one takes longer the more engines."""
    limit_s = plan.publish_timeout_s
    if limit_s is None or limit_s <= PUBLISH.start_to_close_s:
        return PUBLISH
    return replace(PUBLISH, start_to_close_s=limit_s, schedule_to_close_s=3 * limit_s)


CLAIM = Stage("claim", RunRequest, ClaimResult, _HOUR_S, drains=True)
"""A rewind sets aside what it undid: of a bucket, checkpoints are copied for that."""
PREPARE = Stage("prepare", PrepareRequest, PrepareReport, 2 * _HOUR_S)
COLLECT = Stage("collect", CollectRequest, RolloutCollection, 2 * _HOUR_S)
OPTIMIZE = Stage("optimize", OptimizeRequest, UpdateReport, 2 * _HOUR_S, drains=True)
PUBLISH = Stage(
    "publish", PublishRequest, PublicationReport, 600.0, drains=True, schedule_to_close_s=1800.0
)
CHECKPOINT = Stage(
    "checkpoint", CheckpointRequest, CheckpointRef, 1800.0, drains=True, schedule_to_close_s=3600.0
)
EVALUATE = Stage("evaluate", EvaluateRequest, EvaluationReport, 2 * _HOUR_S)
EXPORT = Stage("export", ExportRequest, ExportReport, 1800.0, drains=True)
SNAPSHOT = Stage(
    "snapshot", SnapshotRequest, SnapshotRef, 1800.0, drains=True, schedule_to_close_s=3600.0
)
SUBMIT_EVALUATION = Stage(
    "submit_evaluation", SubmitRequest, EvaluationClaim, 30.0, max_attempts=3, drains=True
)
RECORD_SUBMISSION = Stage(
    "record_submission", SubmissionRecord, type(None), 30.0, max_attempts=3, drains=True
)
RECORD = Stage("record", RecordRequest, type(None), 60.0, drains=True)
REVOKE = Stage("revoke", RevokeRequest, type(None), 600.0, drains=True)

AWAIT_EVALUATION = Stage("await_evaluation", BackgroundOrder, type(None), 24 * _HOUR_S)
EVALUATE_SNAPSHOT = Stage(
    "evaluate_snapshot", BackgroundOrder, EvaluationReport, 3 * _HOUR_S, max_attempts=5
)
RECORD_EVALUATION = Stage("record_evaluation", EvaluationFailure, type(None), 60.0)

PLAN_FIRING = Stage("plan_firing", FiringRequest, Firing, _HOUR_S)
AWAIT_TRAINING = Stage("await_training", str, type(None), 30 * 24 * _HOUR_S)
DECIDE_FIRING = Stage("decide_firing", DecideRequest, RetrainingOutcome, _HOUR_S, drains=True)

STAGES: tuple[Stage[Any, Any], ...] = (
    CLAIM, PREPARE, COLLECT, OPTIMIZE, PUBLISH, CHECKPOINT, EVALUATE, EXPORT, RECORD, REVOKE,
    SNAPSHOT, SUBMIT_EVALUATION, RECORD_SUBMISSION,
    AWAIT_EVALUATION, EVALUATE_SNAPSHOT, RECORD_EVALUATION,
    PLAN_FIRING, AWAIT_TRAINING, DECIDE_FIRING,
)  # fmt: skip
