"""Fully async rollouts: a worker samples freely, a collection takes what is finished.

FreeRun --> CompletedQueue --> Consumption (age, provenance) --> BatchAssembly --> commit
"""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from activities.rollout.admission import AdmissionGate
from activities.rollout.assembly import BatchAssembly
from activities.rollout.attempt import GroupSampler
from activities.rollout.completed import CompletedQueue
from activities.rollout.consumption import Consumption
from activities.rollout.free_run import Budget, FreeRun, Hold
from activities.rollout.observer import PipelineObserver
from activities.rollout.occupancy import Held, Occupancy
from activities.rollout.parts import ProducerParts
from activities.rollout.plans import engine_wait_s, filters_ties
from activities.rollout.policy import ServedPolicy
from activities.rollout.publication_boundary import PublicationBoundary
from activities.rollout.queue_metrics import QueueMetrics
from activities.rollout.selection import Selection
from activities.rollout.siblings import Put
from configs.capacity import completed_groups_capacity, concurrent_groups
from models.errors import ContractViolation, ServiceUnreachable
from models.ports import StageProgress
from models.prompt import PromptDraw
from models.rollout import CollectionManifest, CollectRequest, RolloutCollection
from models.sample import SampleGroup

_log = structlog.get_logger(__name__)


class FreeRollouts:
    """Collections of a fully async run. The worker starts with the first one of an epoch.

    ``make_sampler`` is told where timing rows of attempts go; ``evaluation_gate`` is the gate of
    the calls that are not training calls.
    """

    def __init__(
        self,
        parts: ProducerParts,
        make_sampler: Callable[[Put | None], GroupSampler],
        evaluation_gate: Callable[[], AdmissionGate],
    ) -> None:
        spec = parts.spec
        self._parts = parts
        self._spec = spec
        self._evaluation_gate = evaluation_gate
        self._observer = PipelineObserver(
            parts.store,
            self.snapshot,
            spec.core.pipeline_observation_interval_s,
            lambda: next(iter(parts.pool.urls), None),
        )
        self._sampler = make_sampler(self._observer.writer.put if self._observer.observes else None)
        self._policy = ServedPolicy()
        self._completed = CompletedQueue(completed_groups_capacity(spec))
        self._selection = Selection(spec.training.rollout_batch_size, filters_ties(spec))
        metrics = QueueMetrics()
        self._by_sample = spec.asynchronous.rollout_submission_granularity == "sample"
        self._run = FreeRun(
            budget=Budget(
                concurrent_groups(spec), spec.training.samples_per_prompt, self._by_sample
            ),
            start=self._attempt,
            source=parts.source,
            completed=self._completed,
            selection=self._selection,
            metrics=metrics,
            health=parts.health,
            errors=parts.errors,
            pool=parts.pool,
            engine_wait_s=engine_wait_s(spec),
        )
        self.boundary = PublicationBoundary(spec.core.publication_mode, self._policy, self._run)
        consumption = Consumption(
            spec, parts.source, self._completed, self._selection, self._policy, metrics
        )
        self._assembly = BatchAssembly(
            parts, self._run, self._completed, consumption, self._selection, metrics
        )
        self._update: int | None = None  # whose collection is waited for
        self._epoch: int | None = None  # whose collections the worker works for
        self._ending: asyncio.Task[None] | None = None
        self._is_closed = False
        self._unqueued: list[SampleGroup] = []  # finished groups at the shutdown

    async def collect(self, request: CollectRequest) -> RolloutCollection:
        """Adopt the committed collection of this update and epoch, or commit one.

        Raises:
            ContractViolation: the requested policy version is not the published one.
            PerdureError: what ended the worker.
        """
        self._parts.source.forget(request.consumed_through)
        manifest = await self._parts.writer.find(request)
        if manifest is not None:
            return await self._adopt(request.update, manifest)
        self._require_published(request)
        self._parts.source.give_back_from(request.update)
        self._update = request.update
        try:
            await self._start(request.epoch)
            collection = await self._assembly.collect(request)
        finally:
            self._update = None
        if request.update + 1 >= self._spec.training.num_rollouts:
            self._run.hold(Hold.HORIZON)
            self._end_worker()
        return collection

    def enter_epoch(self, epoch: int) -> None:
        """The first call of ``epoch``: what older ones left behind ends."""
        self.revoke(epoch - 1)
        self.boundary.abandon()

    def revoke(self, epoch: int) -> None:
        """End the worker of ``epoch`` or below; finished groups stay, the other prompts go back."""
        if self._epoch is None or self._epoch > epoch:
            return
        self._epoch = None
        self._end_worker()

    def healed(self) -> None:
        """Dead engines were replaced: what failed under them while nobody collected is forgiven.

        A paused run heals nothing, so its attempts may fail for as long as it pauses.
        """
        if self._update is None:
            self._run.forgive()

    async def quiet(self, timeout_s: float) -> None:
        """Admit no training call and begin no group; return when the engines owe none.

        Calls that wait keep their place in their groups. The queue takes every group in the making,
        so that none waits for a trainer that waits itself.
        """
        self._run.hold(Hold.EVALUATION)
        self._parts.gate.pause()
        self._completed.widen(self._run.owned_groups)
        self._run.wake()
        await self._parts.gate.wait_idle(timeout_s)
        self._observer.event("generation_paused")

    def reopen(self) -> None:
        """Admit calls again. Groups begin once the queue holds no more than its capacity."""
        if Hold.EVALUATION not in self._run.holds:
            return
        self._completed.restore()
        self._parts.gate.resume()
        self._run.unhold(Hold.EVALUATION)
        self._observer.event("generation_resumed")

    def progress(self) -> StageProgress | None:
        """Samples done of the collection that is waited for; None without one."""
        if self._update is None:
            return None
        groups = self._assembly.num_taken + len(self._completed) + len(self._run.ready)
        done = groups * self._spec.training.samples_per_prompt + self._run.in_flight.scored_samples
        total = self._spec.samples_per_collection
        dropped = self._selection.num_dropped
        return StageProgress(
            stage=f"collect {self._update}",
            done=min(done, total),
            total=total,
            detail=f"{dropped} groups filtered" if dropped else "",
        )

    def snapshot(self) -> dict[str, Any]:
        """A row of ``pipeline_occupancy.jsonl`` without its time."""
        run, attempts = self._run, self._run.in_flight
        gate, other = self._parts.gate, self._evaluation_gate()
        return Occupancy(
            completed_queue=Held.of(each.group for each in self._completed),
            producer_ready=Held.of(each.group for each in run.ready),
            shutdown_unqueued=Held.of(self._unqueued),
            completed_put_wait_seconds=run.put_waited_s + run.put_waits_s,
            completed_put_current_wait_seconds=run.put_waits_s,
            producer_owned_groups=run.owned_groups,
            producer_active_group_tasks=attempts.groups,
            producer_admission_open=not run.holds,
            producer_unfinished_samples=attempts.unfinished_samples if self._by_sample else None,
            completed_queue_groups=len(self._completed),
            completed_queue_capacity_groups=self._completed.capacity,
            generation_admission_paused=not gate.is_open,
            generation_admission_waiters=0 if gate.is_open else gate.waiting,
            generation_active_calls=gate.active,
            http_capacity_requests=gate.permits,
            http_active_requests=gate.active + other.active,
            http_waiting_requests=(gate.waiting if gate.is_open else 0) + other.waiting,
            errors=self._parts.health.metrics(),
        ).row()

    async def aclose(self) -> None:
        """End the worker and the observation. Every prompt is in the source or in the queue."""
        if self._is_closed:
            return
        self._is_closed, self._epoch = True, None
        if self._ending is not None:
            await asyncio.wait({self._ending})
        self._observer.event("shutdown_start")
        try:
            await self._run.stop()
        except ServiceUnreachable as error:
            _log.warning("producer_not_shut_down", error=error.message)
            self._observer.event("shutdown_incomplete")
        else:
            self._unqueued = [each.group for each in self._run.ready]
            self._run.ready.clear()
            self._observer.event("shutdown_complete")
        await self._observer.aclose()

    async def _start(self, epoch: int) -> None:
        """Let the worker run for ``epoch``."""
        if self._epoch is None:
            self._assembly.begin_window()
        self._run.unhold(Hold.HORIZON)
        self._epoch = epoch
        self._observer.start()
        await self._run.ensure()

    async def _adopt(self, update: int, manifest: CollectionManifest) -> RolloutCollection:
        """Take over a committed collection; what was drawn since it will be drawn again."""
        groups = await self._parts.writer.read(manifest)
        await self._run.stop()
        # Nothing is awaited from here on: a prompt is either in the queue or in the source.
        self._run.ready.clear()
        self._completed.clear()
        self._assembly.discard_window()
        return self._parts.writer.adopt(update, manifest, groups)

    def _end_worker(self) -> None:
        """End what runs, behind the caller's back; its prompts go back."""
        self._run.end()
        self._ending = asyncio.ensure_future(self._ended())

    async def _ended(self) -> None:
        try:
            await self._run.stop()
        except ServiceUnreachable as error:
            _log.warning("producer_not_quiet", error=error.message)
        self._run.forget_failure()
        await self._parts.errors.report()

    def _require_published(self, request: CollectRequest) -> None:
        """The age of a group is counted from the published version, so it must be known."""
        published, publishing = self._policy.published, self._policy.publishing
        if publishing is None and published == request.policy_version:
            return
        found = f"{published} is" if publishing is None else f"{publishing} is being"
        raise ContractViolation(
            f"collection {request.update} is to start at policy version {request.policy_version}, "
            f"but {found} published"
        )

    async def _attempt(self, draw: PromptDraw, on_sample: Callable[[], None]) -> SampleGroup:
        return await self._sampler.attempt(
            draw,
            self._parts.source.prompt(draw),
            self._parts.gate,
            policy=self._policy,
            exact=None,
            on_sample=on_sample,
        )
