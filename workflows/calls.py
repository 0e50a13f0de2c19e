"""Starting stages and waiting for them, with one rule for cancellation.

Cancelling a run must not tear state: a call that ``drains`` is awaited to its end and its result
counts; any other is cancelled, joined, and the cancellation goes on.
"""

import asyncio
from typing import Any, TypeVar, cast

from temporalio import workflow
from temporalio.exceptions import FailureError

from models.run import LoopPlan
from workflows.options import Stage

Request = TypeVar("Request")
Result = TypeVar("Result")


class StageCall:
    """A started activity together with its stage."""

    def __init__(self, stage: Stage[Any, Any], handle: workflow.ActivityHandle[Any]) -> None:
        self.stage = stage
        self.handle = handle


class StageCalls:
    """Runs the stages of one workflow run."""

    def __init__(self) -> None:
        self.cancelled = False
        """The workflow was asked to cancel while a draining call ran."""

    def start(
        self,
        stage: Stage[Request, Result],
        request: Request,
        plan: LoopPlan | None,
        detail: str = "",
    ) -> StageCall:
        """Schedule ``stage`` and return at once. ``detail`` completes the label in the Web UI."""
        handle = workflow.start_activity(
            stage.name,
            request,
            result_type=stage.result,
            **stage.config(plan, f"{stage.name} {detail}".strip()),
        )
        return StageCall(stage, handle)

    async def wait(self, call: StageCall) -> Any:
        """The result of a started call.

        Raises:
            ActivityError: the stage failed.
            asyncio.CancelledError: the run is being cancelled and the stage does not drain.
        """
        try:
            return await asyncio.shield(call.handle)
        except asyncio.CancelledError:
            self.cancelled = True
            if not call.stage.drains:
                await self.drop(call)
                raise
            return await call.handle

    async def drop(self, call: StageCall) -> None:
        """Cancel a started call, wait until its activity has ended, and forget how."""
        call.handle.cancel()
        while not call.handle.done():
            try:
                await asyncio.shield(call.handle)
            except FailureError:
                workflow.logger.info("%s dropped", call.stage.name)
            except asyncio.CancelledError:
                # Either the call's own end, or the run's cancellation, which must not be lost.
                self.cancelled = self.cancelled or not call.handle.done()

    async def run(
        self,
        stage: Stage[Request, Result],
        request: Request,
        plan: LoopPlan | None,
        detail: str = "",
    ) -> Result:
        """Start ``stage`` and wait for its result."""
        return cast("Result", await self.wait(self.start(stage, request, plan, detail)))
