"""The ``Training`` workflow: claim, prepare, then update after update, and one of three ends.

::

    control queue                 fleet queue
    claim --continue-as-new-->    prepare -> publish -> evaluate -> [ update ]* -> export
                                     ^                                  |
                                     +------- claim <---- a lost actor -+

    then: revoke the epoch, tear down, record  ->  complete | stopped | failed

What is due next is decided in ``loop``; what can be repaired, in ``recovery``. The workflow moves
to the fleet's queue after the claim, because an activity on the workflow's own worker starts
eagerly, without two queue hops.
"""

import asyncio
from datetime import timedelta
from typing import Any, NoReturn

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import ApplicationError, FailureError

from models.errors import ConfigurationError, PerdureError
from models.run import RunOutcome, RunProgress, RunRequest, RunState, StopRequest
from workflows import loop
from workflows.calls import StageCalls
from workflows.recovery import Failure, classify
from workflows.request import parse_request
from workflows.stages import RunStages

DRAIN_TIMEOUT = timedelta(minutes=1)
"""Longest wait for message handlers; they only set fields, so any wait is a defect."""

_ENDS = {loop.Step.STOP: RunState.STOPPED, loop.Step.COMPLETE: RunState.COMPLETE}


@workflow.defn(name="Training", failure_exception_types=[ValidationError, PerdureError])
class Training:
    """One run. The workflow id is the run's id; ``progress`` answers what it has done."""

    @workflow.init
    def __init__(self, *inputs: Any) -> None:
        request, self._refused = _parsed(inputs)
        self._calls = StageCalls()
        self._stages = RunStages(request, self._calls)
        self._closing = False

    @workflow.run
    async def run(self, *inputs: Any) -> RunOutcome:
        """Run to an end. Fails with the type of the error that ended it.

        Takes one ``RunRequest``; any other input fails the run (see ``workflows.request``).
        """
        if self._refused is not None:
            raise _failed(Failure(self._refused.type_name(), self._refused.message, False))
        if self._stages.progress.run is None:
            await self._claim()
            if not self._calls.cancelled:
                await self._continue_as_new()
        state, failure = await self._supervise()
        self._closing = True
        await self._stages.finish(state, failure)
        await workflow.wait_condition(workflow.all_handlers_finished, timeout=DRAIN_TIMEOUT)
        if self._calls.cancelled and state is RunState.STOPPED:
            raise asyncio.CancelledError
        if failure is not None:
            raise _failed(failure)
        return self._stages.outcome()

    async def _claim(self) -> None:
        """Take the output root. A refusal ends the run and leaves its files as they were."""
        try:
            await self._stages.claim()
        except FailureError as error:
            raise _failed(classify(error)) from error
        if self._calls.cancelled:
            self._stages.note_cancel()

    async def _supervise(self) -> tuple[RunState, Failure | None]:
        """Advance until an end, rebuilding what is lost on the way."""
        while True:
            try:
                return await self._advance(), None
            except asyncio.CancelledError:
                self._calls.cancelled = True
                self._stages.note_cancel()
            except FailureError as error:
                failure = classify(error)
                if self._calls.cancelled:
                    self._stages.note_error(failure)
                    return RunState.STOPPED, None
                if not failure.recoverable:
                    return RunState.FAILED, failure
                exhausted = self._stages.note_recovery(failure)
                if exhausted is not None:
                    return RunState.FAILED, exhausted

    async def _advance(self) -> RunState:
        """One step after another until the run ends or one fails."""
        stages = self._stages
        if not stages.is_up:
            if stages.progress.stop is not None:
                return RunState.STOPPED
            await stages.bring_up()
        while True:
            if self._calls.cancelled:
                stages.note_cancel()
            step = stages.next_step()
            if step in _ENDS:
                return _ENDS[step]
            if step is loop.Step.CONTINUE_AS_NEW:
                await self._continue_as_new()
            await stages.take(step)

    async def _continue_as_new(self) -> NoReturn:
        """Start a fresh history on the fleet's queue, progress carried over, fleet untouched.

        The queue comes from the progress and not from ``workflow.info()``, which names the queue
        of whoever replays.
        """
        await workflow.wait_condition(workflow.all_handlers_finished, timeout=DRAIN_TIMEOUT)
        queue = self._stages.progress.fleet_queue
        workflow.continue_as_new(self._stages.carried(), task_queue=queue)

    @workflow.query(description="What the run has done so far, and the stage that it awaits.")
    def progress(self) -> RunProgress:
        """The whole state of the run."""
        return self._stages.progress

    @workflow.update(description="Start no further update until resumed; the fleet stays up.")
    async def pause(self) -> RunProgress:
        """Pause at the next boundary."""
        self._stages.set(paused=True)
        return self._stages.progress

    @pause.validator
    def _pause_allowed(self) -> None:
        self._refuse_when_ending()
        if self._stages.progress.paused:
            raise _refusal("the run is paused already")

    @workflow.update(description="Go on after a pause.")
    async def resume(self) -> RunProgress:
        """Take back a pause."""
        self._stages.set(paused=False)
        return self._stages.progress

    @resume.validator
    def _resume_allowed(self) -> None:
        self._refuse_when_ending()
        if not self._stages.progress.paused:
            raise _refusal("the run is not paused")

    @workflow.update(description="Commit a checkpoint after the running update; returns at once.")
    async def checkpoint_now(self) -> RunProgress:
        """Ask for a checkpoint at the next boundary; poll ``progress`` for it."""
        self._stages.set(checkpoint_requests=self._stages.progress.checkpoint_requests + 1)
        return self._stages.progress

    @checkpoint_now.validator
    def _checkpoint_allowed(self) -> None:
        self._refuse_when_ending()
        progress = self._stages.progress
        if progress.plan is not None and not progress.plan.save_checkpoints:
            raise _refusal("training.save_checkpoints is off in the run file")
        if progress.paused and loop.is_committed(progress):
            raise _refusal(
                f"update {progress.next_update} is the last one and already in "
                f"{progress.checkpoint.folder if progress.checkpoint else ''}"
            )

    @workflow.update(description="End at the next boundary, resumable. Input: reason, checkpoint.")
    async def stop(self, request: StopRequest = StopRequest()) -> RunProgress:  # noqa: B008
        """Stop after the running update, with a checkpoint unless told otherwise."""
        self._stages.set(stop=request)
        return self._stages.progress

    @stop.validator
    def _stop_allowed(self, request: StopRequest = StopRequest()) -> None:  # noqa: B008
        self._refuse_when_ending()

    def _refuse_when_ending(self) -> None:
        progress = self._stages.progress
        if self._closing or progress.state.is_terminal:
            raise _refusal(f"the run is ending ({progress.state.value})")
        if progress.stop is not None:
            reason = progress.stop.reason or "no reason given"
            raise _refusal(f"the run is stopping already: {reason}")


def _parsed(inputs: tuple[Any, ...]) -> tuple[RunRequest, ConfigurationError | None]:
    """The request, or why there is none: raised by ``run``, because ``__init__`` cannot fail."""
    try:
        return parse_request(inputs), None
    except ConfigurationError as error:
        return RunRequest(), error


def _failed(failure: Failure) -> ApplicationError:
    return ApplicationError(failure.message, type=failure.type, non_retryable=True)


def _refusal(message: str) -> ApplicationError:
    return ApplicationError(message, type="Refused", non_retryable=True)
