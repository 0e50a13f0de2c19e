"""The ``Retraining`` workflow: one firing of a schedule.

::

    plan_firing -> nothing to do
                -> child Training train/<firing> -> decide_firing -> promoted | refused | failed

It lives on the control queue. The run is an ordinary one: paused, resumed, stopped and looked at by
its id, which follows from this workflow's id alone, so that a repeated firing joins or skips it.
"""

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import (
    ApplicationError,
    ChildWorkflowError,
    FailureError,
    WorkflowAlreadyStartedError,
    is_cancelled_exception,
)

from models.errors import ConfigurationError, PerdureError
from models.retraining import (
    DecideRequest,
    Decision,
    FiringPlan,
    FiringRequest,
    RetrainingOutcome,
    RetrainingRequest,
)
from models.run import RunOutcome
from workflows import options
from workflows.calls import StageCalls
from workflows.recovery import Failure, classify
from workflows.request import parse_input

WORKFLOW_TYPE = "Retraining"
_REMEDY = "make it with: perdure schedule render RUN.toml --data PATTERN"


@workflow.defn(name=WORKFLOW_TYPE, failure_exception_types=[ValidationError, PerdureError])
class Retraining:
    """One firing. Fails only when its run did not complete, or its request is wrong."""

    def __init__(self) -> None:
        self._calls = StageCalls()
        self._cancelled = False

    @workflow.run
    async def run(self, *inputs: Any) -> RetrainingOutcome:
        """Plan, train, decide. Any input but one ``RetrainingRequest`` fails the firing."""
        try:
            request = parse_input(inputs, RetrainingRequest, _REMEDY)
        except ConfigurationError as error:
            raise _failed(Failure(error.type_name(), error.message, False)) from error
        try:
            outcome = await self._fire(request)
        except FailureError as error:
            if is_cancelled_exception(error) or isinstance(error, ApplicationError):
                raise
            raise _failed(classify(error)) from error
        workflow.set_current_details(_details(outcome))
        if outcome.decision is Decision.FAILED:
            raise _failed(Failure("TrainingFailed", f"{outcome.run_id}: {outcome.reason}", False))
        return outcome

    async def _fire(self, request: RetrainingRequest) -> RetrainingOutcome:
        asked = FiringRequest(request=request, workflow_id=workflow.info().workflow_id)
        firing = await self._calls.run(options.PLAN_FIRING, asked, None)
        if firing.outcome is not None:
            return firing.outcome
        if firing.plan is None:
            raise ApplicationError("plan_firing answered neither plan nor outcome")
        plan = firing.plan
        error = "" if firing.is_trained else await self._train(plan)
        decision = DecideRequest(request=request, plan=plan, error=error)
        return await self._calls.run(options.DECIDE_FIRING, decision, None, plan.name)

    async def _train(self, plan: FiringPlan) -> str:
        """Run the training to its end; returns how it failed, empty when it did not."""
        files = len(plan.data.files)
        workflow.set_current_details(
            f"## training\n\n- run: `{plan.run_id}`\n- data: {plan.data.rows} rows of {files} "
            f"files, sha256 `{plan.data.sha256[:16]}`\n- from: `{plan.parent.source}`"
        )
        starting = asyncio.ensure_future(_start(plan))
        await self._settled(starting)
        try:
            child = starting.result()
        except WorkflowAlreadyStartedError:
            if self._cancelled:  # somebody else's run goes on
                raise asyncio.CancelledError from None
            await self._calls.run(options.AWAIT_TRAINING, plan.run_id, None, plan.run_id)
            return ""
        await self._settled(child, plan.run_id)
        failure = child.exception()
        if self._cancelled:
            raise asyncio.CancelledError
        if failure is not None:
            return str(_failure_of(failure))
        if child.result().restarts:  # somebody rewinds it
            await self._restarted(plan.run_id)
        return ""

    async def _restarted(self, run_id: str) -> None:
        """Wait for the end of the run that goes on under this id; a cancellation ends it."""
        call = self._calls.run(options.AWAIT_TRAINING, run_id, None, run_id)
        waiting = asyncio.ensure_future(call)
        await self._settled(waiting, run_id)
        if self._cancelled:
            raise asyncio.CancelledError
        waiting.result()

    async def _settled(self, task: "asyncio.Future[Any]", run_id: str = "") -> None:
        """Wait until ``task`` is done. A cancellation is noted, and asks the run to end.

        It is asked by its id: what a parent sends to its child goes to the child's first history,
        and a run continues as new after its claim.
        """
        asked = False
        while not task.done():
            if self._cancelled and run_id and not asked:
                asked = True
                await _cancel(run_id)
            try:
                await workflow.wait_condition(task.done)
            except asyncio.CancelledError:
                self._cancelled = True


def _start(plan: FiringPlan) -> Coroutine[Any, Any, workflow.ChildWorkflowHandle[Any, RunOutcome]]:
    files = len(plan.data.files)
    return workflow.start_child_workflow(
        "Training",
        plan.training,
        id=plan.run_id,
        task_queue=options.CONTROL_QUEUE,
        result_type=RunOutcome,
        execution_timeout=timedelta(seconds=plan.timeout_s) if plan.timeout_s else None,
        cancellation_type=workflow.ChildWorkflowCancellationType.ABANDON,
        # A run that is terminated tears nothing down; one that is asked to end does.
        parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
        memo={
            "identity_sha256": plan.identity_sha256,
            "root": plan.run_root,
            "num_rollouts": plan.num_rollouts,
        },
        static_summary=f"{plan.name}: {plan.data.rows} rows of {files} new files",
    )


async def _cancel(run_id: str) -> None:
    try:
        await workflow.get_external_workflow_handle(run_id).cancel()
    except FailureError as error:
        workflow.logger.info("%s has ended already: %s", run_id, error)


def _failure_of(error: BaseException) -> Failure:
    """Name a failed run by its own error."""
    if is_cancelled_exception(error):
        return Failure("Cancelled", "the run was canceled", False)
    cause = error.cause if isinstance(error, ChildWorkflowError) else error
    if isinstance(cause, ApplicationError):
        return Failure(cause.type or "ApplicationError", cause.message, False)
    return Failure(type(cause).__name__, str(cause or error), False)


def _failed(failure: Failure) -> ApplicationError:
    return ApplicationError(failure.message, type=failure.type, non_retryable=True)


def _details(outcome: RetrainingOutcome) -> str:
    lines = [f"## {outcome.decision.value.replace('_', ' ')}", "", f"- {outcome.reason}"]
    if outcome.run_id:
        lines.append(f"- run: `{outcome.run_id}`")
    if outcome.export:
        lines.append(f"- export: `{outcome.export}`")
    return "\n".join(lines)
