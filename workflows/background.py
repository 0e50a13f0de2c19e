"""Handing evaluations over: a snapshot, a claimed receipt, a child workflow that nobody joins.

A submission that fails never fails the run: it is written into the receipt and the loop goes on.
Only what the loop repairs anyway (a lost trainer, a stale epoch) leaves this module as an error.
"""

import asyncio
from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import FailureError, WorkflowAlreadyStartedError

from models.background import (
    BackgroundOrder,
    EvaluationClaim,
    SnapshotRef,
    SnapshotRequest,
    SubmissionRecord,
    SubmitRequest,
)
from models.errors import ContractViolation
from models.evaluation import EvaluationReport, EvaluationSubmission, ReceiptStatus
from models.run import LoopPlan, RunProgress
from workflows import options
from workflows.calls import StageCalls
from workflows.recovery import REBUILT, Failure, classify

WORKFLOW_TYPE = "BackgroundEvaluation"


class BackgroundEvaluations:
    """Submits the evaluations of one workflow run."""

    def __init__(self, calls: StageCalls) -> None:
        self._calls = calls

    async def submit(self, progress: RunProgress, phase: str) -> EvaluationSubmission:
        """Hand over the evaluation that is due after ``progress.next_update`` updates.

        Raises:
            ActivityError: the snapshot failed in a way that a rebuild repairs, or the epoch is
                stale.
        """
        plan = _plan_of(progress)
        given_up = EvaluationSubmission(
            update=progress.next_update, phase=phase, status=ReceiptStatus.SUBMISSION_FAILED
        )
        try:
            snapshot = await self._snapshot(progress, plan)
        except FailureError as error:
            failure = classify(error)
            if failure.recoverable:
                raise
            return await self._record(progress, plan, _failed(given_up, failure))
        try:
            claim = await self._claim(progress, plan, phase, snapshot)
        except FailureError as error:
            failure = classify(error)
            if failure.type in REBUILT:
                raise
            return await self._record(progress, plan, _failed(given_up, failure), snapshot)
        if claim.order is None:
            return claim.submission
        started = await self._start(claim.order, plan, progress.fleet_queue)
        submission = claim.submission.model_copy(update={"status": ReceiptStatus.SUBMITTED})
        if started is not None:
            submission = _failed(claim.submission, started)
        return await self._record(progress, plan, submission)

    async def _snapshot(self, progress: RunProgress, plan: LoopPlan) -> SnapshotRef:
        if progress.run is None:
            raise ContractViolation("a snapshot was asked for before the claim")
        request = SnapshotRequest(
            run=progress.run,
            epoch=progress.epoch,
            update=progress.next_update,
            policy_version=progress.policy_version,
        )
        detail = f"after update {progress.next_update}"
        return await self._calls.run(options.SNAPSHOT, request, plan, detail)

    async def _claim(
        self, progress: RunProgress, plan: LoopPlan, phase: str, snapshot: SnapshotRef
    ) -> EvaluationClaim:
        if progress.run is None:
            raise ContractViolation("a submission was asked for before the claim")
        stage = replace(options.SUBMIT_EVALUATION, start_to_close_s=plan.eval_submit_timeout_s)
        request = SubmitRequest(
            run=progress.run, epoch=progress.epoch, phase=phase, snapshot=snapshot
        )
        detail = f"{phase} after update {progress.next_update}"
        return await self._calls.run(stage, request, plan, detail)

    async def _start(self, order: BackgroundOrder, plan: LoopPlan, queue: str) -> Failure | None:
        """Start the child; one that was started under this id before counts as started."""
        starting = asyncio.ensure_future(
            workflow.start_child_workflow(
                WORKFLOW_TYPE,
                order,
                id=order.experiment_id,
                task_queue=queue,
                result_type=EvaluationReport,
                cancellation_type=workflow.ChildWorkflowCancellationType.ABANDON,
                parent_close_policy=workflow.ParentClosePolicy.ABANDON,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                static_summary=f"{order.phase} evaluation after update {order.snapshot.update}",
            )
        )
        limit = timedelta(seconds=plan.eval_submit_timeout_s * plan.infra_timeout_multiplier)
        while not starting.done():
            try:
                await workflow.wait_condition(starting.done, timeout=limit)
            except asyncio.CancelledError:
                # The run is being cancelled; whether the child exists must be known all the same.
                self._calls.cancelled = True
            except TimeoutError:
                return Failure("TimeoutError", f"no answer within {limit}", recoverable=False)
        try:
            await starting
        except WorkflowAlreadyStartedError:
            return None
        except FailureError as error:
            return classify(error)
        return None

    async def _record(
        self,
        progress: RunProgress,
        plan: LoopPlan,
        submission: EvaluationSubmission,
        snapshot: SnapshotRef | None = None,
    ) -> EvaluationSubmission:
        if submission.status is ReceiptStatus.SUBMISSION_FAILED:
            workflow.logger.warning(
                "evaluation after update %d was not submitted: %s: %s",
                submission.update,
                submission.error_type,
                submission.error,
            )
        if progress.run is None:
            return submission
        request = SubmissionRecord(run=progress.run, submission=submission, snapshot=snapshot)
        try:
            await self._calls.run(options.RECORD_SUBMISSION, request, plan, submission.status.value)
        except FailureError as error:
            workflow.logger.warning("the receipt is not up to date: %s", classify(error))
        return submission


def _plan_of(progress: RunProgress) -> LoopPlan:
    if progress.plan is None:
        raise ContractViolation("an evaluation was due before the claim")
    return progress.plan


def _failed(submission: EvaluationSubmission, failure: Failure) -> EvaluationSubmission:
    return submission.model_copy(
        update={
            "status": ReceiptStatus.SUBMISSION_FAILED,
            "error_type": failure.type,
            "error": failure.message,
        }
    )
