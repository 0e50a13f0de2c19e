"""The run's stages in workflow code: each awaits one activity and adds what it learnt to progress.

No decisions here; ``loop`` decides and ``training`` calls.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from temporalio import workflow
from temporalio.exceptions import FailureError

from models.checkpoint import CheckpointRequest
from models.errors import ContractViolation
from models.evaluation import EvaluateRequest, ExportRequest
from models.ids import RunRef
from models.publication import PublishRequest
from models.rollout import CollectRequest, RolloutCollection
from models.run import (
    LoopPlan,
    PrepareRequest,
    RecordRequest,
    RevokeRequest,
    RunOutcome,
    RunProgress,
    RunRequest,
    RunState,
    StopRequest,
)
from models.update import OptimizeRequest, UpdateReport
from workflows import details, loop, options
from workflows.background import BackgroundEvaluations
from workflows.calls import StageCall, StageCalls
from workflows.indexing import index
from workflows.recovery import Failure, classify


class RunStages:
    """The stages of one workflow run over its ``RunProgress``."""

    def __init__(self, request: RunRequest, calls: StageCalls) -> None:
        self.progress = request.progress or RunProgress()
        self._request = request
        self._calls = calls
        self._background = BackgroundEvaluations(calls)
        self._ahead: RolloutCollection | None = None
        """The next update's collection, sampled during the last one."""
        self._chain_updates = 0
        self._updated_at: float | None = None
        """When the last update ended; unknown after a pause, which is no update's time."""
        self._must_reclaim = False
        self.is_up = self.progress.state is RunState.TRAINING
        """The fleet was brought up and nothing is known to be lost."""
        self._describe()

    def set(self, **changes: Any) -> None:
        """Replace fields of the progress and redraw the current details."""
        self.progress = self.progress.model_copy(update=changes)
        self._describe()

    def next_step(self) -> loop.Step:
        """What is due now."""
        return loop.next_step(
            self._plan,
            self.progress,
            chain_updates=self._chain_updates,
            suggested=workflow.info().is_continue_as_new_suggested(),
        )

    async def take(self, step: loop.Step) -> None:
        """Do a step that is not an end."""
        stages: dict[loop.Step, Callable[[], Awaitable[None]]] = {
            loop.Step.PUBLISH: self.publish,
            loop.Step.CHECKPOINT: self.checkpoint,
            loop.Step.EVALUATE: self.evaluate,
            loop.Step.EXPORT: self.export,
            loop.Step.PAUSE: self.pause,
            loop.Step.UPDATE: self.update,
        }
        await stages[step]()

    def carried(self) -> RunRequest:
        """Input of the next workflow run in the chain."""
        progress = self.progress.model_copy(update={"chain_index": self.progress.chain_index + 1})
        return self._request.model_copy(update={"progress": progress})

    async def claim(self) -> None:
        """Take (or, after a loss, retake) the root under a new epoch."""
        self.set(stage="claim")
        request = self.carried() if self.progress.run is not None else self._request
        result = await self._calls.run(options.CLAIM, request, self.progress.plan)
        self.set(
            run=result.run,
            epoch=result.epoch,
            plan=result.plan,
            attempt=result.attempt,
            fleet_queue=result.fleet_queue,
            search_attributes=result.search_attributes,
            checkpoint=result.checkpoint,
            rewind=result.rewind,
            started_unix=self.progress.started_unix or result.started_unix,
        )
        index(self.progress, self._plan)

    async def bring_up(self) -> None:
        """Make the fleet live: a first start, or a rebuild under a new epoch."""
        if self._must_reclaim:
            await self.claim()
        self._must_reclaim = False
        self.set(stage="prepare", published_version=-1)
        self._ahead, self._updated_at = None, None
        first = self.progress.state is RunState.PREPARING
        checkpoint = self.progress.checkpoint
        expected = self.progress.next_update
        if first and checkpoint is not None:
            expected = checkpoint.update + 1
        request = PrepareRequest(
            run=self._run,
            epoch=self.progress.epoch,
            checkpoint=checkpoint,
            next_update=expected,
            # What a failed teardown left of the fleet may have trained what is undone now.
            resume_exactly=first and self.progress.rewind is not None,
        )
        report = await self._calls.run(options.PREPARE, request, self._plan)
        evaluated = self.progress.last_evaluated_update
        self.set(
            next_update=report.next_update,
            # What was evaluated beyond a rewind is gone; what is redone need not be the same.
            last_evaluated_update=evaluated if evaluated <= report.next_update else -1,
            policy_version=report.policy_version,
            consumed_through=report.consumed_through,
            updates_redone=self.progress.updates_redone + max(0, expected - report.next_update),
        )
        if first:
            await self._enter_training(report.fleet_seconds)
        self.is_up = True

    async def publish(self) -> None:
        """Make the current policy version live on every engine."""
        version = self.progress.policy_version
        self.set(stage=f"publish {version}")
        request = PublishRequest(
            run=self._run,
            epoch=self.progress.epoch,
            update=self.progress.next_update,
            version=version,
        )
        stage = options.publish_stage(self._plan)
        await self._calls.run(stage, request, self._plan, f"version {version}")
        self.set(published_version=version)

    async def update(self) -> None:
        """One optimizer update, with the next collection beside it when the lag bound allows."""
        update = self.progress.next_update
        if self._updated_at is None:
            self._updated_at = workflow.now().timestamp()
        collection = await self._collected(update)
        self.set(stage=f"optimize {update}")
        request = OptimizeRequest(
            run=self._run, epoch=self.progress.epoch, update=update, collection=collection
        )
        ahead = None
        optimize = self._calls.start(options.OPTIMIZE, request, self._plan, f"update {update}")
        if loop.collects_ahead(self._plan, self.progress, workflow.now().timestamp()):
            ahead = self._start_collect(update + 1)
        try:
            report = await self._calls.wait(optimize)
        except FailureError:
            if ahead is not None:
                await self._calls.drop(ahead)
            raise
        self._account(collection, report)
        if ahead is not None:
            await self._keep(ahead, update + 1)

    async def checkpoint(self) -> None:
        """Commit the finished updates."""
        update = self.progress.next_update - 1
        self.set(stage=f"checkpoint {update}")
        request = CheckpointRequest(
            run=self._run,
            epoch=self.progress.epoch,
            update=update,
            policy_version=self.progress.policy_version,
        )
        served = self.progress.checkpoint_requests
        reference = await self._calls.run(
            options.CHECKPOINT, request, self._plan, f"update {update}"
        )
        # Requests that arrived while it ran were made after its cut and wait for the next one.
        left = max(0, self.progress.checkpoint_requests - served)
        self.set(checkpoint=reference, checkpoint_requests=left)
        index(self.progress, self._plan)

    async def evaluate(self) -> None:
        """Sample and score the held-out prompts under the live policy, or have it done."""
        done = self.progress.next_update
        phase = loop.evaluation_phase(self._plan, self.progress) or "periodic"
        self.set(stage=f"evaluate {done}")
        if self._plan.eval_background:
            submission = await self._background.submit(self.progress, phase)
            self.set(submission=submission, last_evaluated_update=done)
            return
        request = EvaluateRequest(
            run=self._run,
            epoch=self.progress.epoch,
            update=done,
            policy_version=self.progress.policy_version,
            phase=phase,
        )
        report = await self._calls.run(
            options.EVALUATE, request, self._plan, f"{phase} after update {done}"
        )
        self.set(evaluation=report, last_evaluated_update=done)

    async def export(self) -> None:
        """Write the final Hugging Face folder."""
        self.set(stage="export")
        request = ExportRequest(
            run=self._run,
            epoch=self.progress.epoch,
            update=self.progress.next_update,
            policy_version=self.progress.policy_version,
        )
        report = await self._calls.run(options.EXPORT, request, self._plan)
        self.set(export_uri=report.uri)

    async def pause(self) -> None:
        """Wait until resumed, stopped, or asked for a checkpoint that is not there yet."""
        self.set(stage="paused")
        await workflow.wait_condition(
            lambda: (
                not self.progress.paused
                or self.progress.stop is not None
                or loop.checkpoint_due(self._plan, self.progress)
            )
        )
        self._updated_at = None

    async def finish(self, state: RunState, failure: Failure | None) -> None:
        """Revoke the epoch first, tear the fleet down, then record how the run ended."""
        if failure is not None:
            self.note_error(failure)
        self.set(state=state, stage="revoke", finished_unix=workflow.now().timestamp())
        request = RevokeRequest(
            run=self._run,
            epoch=self.progress.epoch,
            teardown=True,
            completed=state is RunState.COMPLETE,
        )
        try:
            await self._calls.run(options.REVOKE, request, self._plan)
        except FailureError as error:
            workflow.logger.error("the fleet may be left over: %s", classify(error))
        self.set(stage=state.value)
        try:
            await self._record()
        except FailureError as error:
            workflow.logger.error("workflow.json is not up to date: %s", classify(error))

    def outcome(self) -> RunOutcome:
        """The run's result, of this attempt where it says so."""
        progress = self.progress
        first, last = progress.first_update, progress.next_update - 1
        return RunOutcome(
            run_id=self._run.run_id,
            state=progress.state,
            completed_rollout_ids=(first, last) if last >= first else None,
            start_rollout_id=first,
            updates=progress.next_update,
            policy_version=progress.policy_version,
            stopped_for_time=progress.stopped_for_time,
            export_hf=progress.export_uri,
            checkpoint=progress.checkpoint,
            evaluation=progress.evaluation,
            submission=progress.submission,
            error=progress.error,
            restarts=(
                progress.state is RunState.STOPPED
                and progress.stop is not None
                and progress.stop.restarts
            ),
        )

    def note_recovery(self, failure: Failure) -> Failure | None:
        """Count a loss and mark the fleet for a rebuild; a failure when there were too many."""
        in_a_row = self.progress.recoveries_in_a_row + 1
        workflow.logger.warning("rebuilding (%d in a row) after %s", in_a_row, failure)
        self.is_up, self._must_reclaim = False, True
        if in_a_row > self._plan.max_recoveries:
            limit = f"launch.max_recoveries = {self._plan.max_recoveries}"
            return Failure(
                failure.type, f"{failure.message} (no update finished since; {limit})", False
            )
        self.set(recoveries=self.progress.recoveries + 1, recoveries_in_a_row=in_a_row)
        return None

    def note_cancel(self) -> None:
        """Turn a cancellation into a stop with a checkpoint, which then ends CANCELED."""
        if self.progress.stop is None:
            reason = workflow.cancellation_reason() or "no reason given"
            self.set(stop=StopRequest(reason=f"cancelled: {reason}", checkpoint=self.is_up))

    def note_error(self, failure: Failure) -> None:
        """Keep the error for readers of the progress and of ``workflow.json``."""
        self.set(error=failure.message, error_type=failure.type)

    async def _collected(self, update: int) -> RolloutCollection:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.update == update:
            return ahead
        self.set(stage=f"collect {update}")
        collection: RolloutCollection = await self._calls.wait(self._start_collect(update))
        return collection

    def _start_collect(self, update: int) -> StageCall:
        request = CollectRequest(
            run=self._run,
            epoch=self.progress.epoch,
            update=update,
            policy_version=self.progress.published_version,
            consumed_through=self.progress.consumed_through,
        )
        return self._calls.start(options.COLLECT, request, self._plan, f"update {update}")

    async def _keep(self, ahead: StageCall, update: int) -> None:
        """Await the collection sampled ahead; nothing may be in flight at a boundary."""
        if self._calls.cancelled:
            await self._calls.drop(ahead)
            return
        self.set(stage=f"collect {update}")
        self._ahead = await self._calls.wait(ahead)

    def _account(self, collection: RolloutCollection, report: UpdateReport) -> None:
        """Count a finished update and look at the soft deadline."""
        now = workflow.now().timestamp()
        progress = self.progress
        reward = collection.reward_mean
        is_new = report.update >= progress.furthest_update
        update_s = now - (self._updated_at or now)
        # A fully async collection is mostly sampled before anybody asks for it.
        sampled_s = update_s if self._plan.fully_async else collection.seconds
        self.set(
            next_update=report.update + 1,
            policy_version=report.policy_version,
            # Engines without their memory serve no version, also where none is newer.
            published_version=-1 if report.engines_released else progress.published_version,
            consumed_through=report.update,
            # Redone updates do not count: a loss that repeats at one update must end some time.
            recoveries_in_a_row=0 if is_new else progress.recoveries_in_a_row,
            furthest_update=max(progress.furthest_update, report.update + 1),
            lag=progress.policy_version - collection.min_version,
            reward_first=reward if progress.reward_first is None else progress.reward_first,
            reward_last=reward,
            reward_recent=loop.recent_rewards(progress.reward_recent, reward),
            tokens_per_second=collection.counts.response_tokens / max(sampled_s, 1e-9),
            seconds_per_update=loop.smoothed(progress.seconds_per_update, update_s),
            stopped_for_time=loop.deadline_reached(progress, now),
        )
        self._updated_at = now
        self._chain_updates += 1

    async def _enter_training(self, fleet_s: float) -> None:
        """Preparing is over: set the soft deadline and tell the readers.

        The start of the fleet, ``fleet_s``, is time of the run; making model and data is not.
        """
        now = workflow.now().timestamp()
        limit = self._plan.max_run_seconds
        self.set(
            state=RunState.TRAINING,
            stage="record",
            first_update=self.progress.next_update,
            training_started_unix=now,
            deadline_unix=None if limit is None else now - fleet_s + limit,
        )
        await self._record()

    async def _record(self) -> None:
        """Write ``workflow.json`` and the search attributes."""
        index(self.progress, self._plan)
        request = RecordRequest(progress=self.progress)
        await self._calls.run(options.RECORD, request, self._plan, self.progress.state.value)

    def _describe(self) -> None:
        workflow.set_current_details(details.render(self.progress))

    @property
    def _plan(self) -> LoopPlan:
        if self.progress.plan is None:
            raise ContractViolation("a stage was called before the claim")
        return self.progress.plan

    @property
    def _run(self) -> RunRef:
        if self.progress.run is None:
            raise ContractViolation("a stage was called before the claim")
        return self.progress.run
