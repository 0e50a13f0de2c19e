"""The ``BackgroundEvaluation`` workflow: wait for its turn, evaluate a snapshot, say how it ended.

A child of the run that ordered it, which neither waits for it nor takes it along when it ends; or
started by hand for a resubmission. It lives on the fleet's queue.
"""

import asyncio
from dataclasses import replace
from typing import cast

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import ApplicationError, FailureError, is_cancelled_exception

from models.background import BackgroundOrder, EvaluationFailure
from models.errors import PerdureError
from models.evaluation import EvaluationReport
from workflows import options
from workflows.background import WORKFLOW_TYPE
from workflows.calls import StageCalls
from workflows.recovery import Failure, classify


@workflow.defn(name=WORKFLOW_TYPE, failure_exception_types=[ValidationError, PerdureError])
class BackgroundEvaluation:
    """One evaluation of one snapshot. Its input is fixed by a receipt under the output root."""

    @workflow.run
    async def run(self, order: BackgroundOrder) -> EvaluationReport:
        """Evaluate; fails with the type of the error that ended it, after that is on record."""
        calls = StageCalls()
        try:
            return await _evaluated(order, calls)
        except asyncio.CancelledError:
            await _record(order, calls, Failure("Cancelled", "it was cancelled", False))
            raise
        except FailureError as error:
            if is_cancelled_exception(error):
                await _record(order, calls, Failure("Cancelled", "it was cancelled", False))
                raise
            failure = classify(error)
            await _record(order, calls, failure)
            raise ApplicationError(
                failure.message, type=failure.type, non_retryable=True
            ) from error


async def _evaluated(order: BackgroundOrder, calls: StageCalls) -> EvaluationReport:
    if order.after is not None:
        try:
            await calls.run(options.AWAIT_EVALUATION, order, order.plan, order.after)
        except FailureError as error:
            if is_cancelled_exception(error):
                raise
            workflow.logger.warning("not waiting for %s: %s", order.after, classify(error))
    stage = replace(options.EVALUATE_SNAPSHOT, start_to_close_s=order.timeout_s)
    call = calls.start(stage, order, order.plan, f"after update {order.snapshot.update}")
    return cast("EvaluationReport", await calls.wait(call))


async def _record(order: BackgroundOrder, calls: StageCalls, failure: Failure) -> None:
    request = EvaluationFailure(order=order, error_type=failure.type, error=failure.message)
    try:
        await calls.run(options.RECORD_EVALUATION, request, order.plan)
    except FailureError as error:
        workflow.logger.error("the receipt is not up to date: %s", classify(error))
