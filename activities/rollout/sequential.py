"""Sequential rollouts: each collection is sampled when it is asked for, under one policy version.

Back-pressure: at most a batch of groups is drawn at a time, and the gate admits
``server_concurrency`` calls per engine.
"""

import time

from activities.rollout.attempt import GroupSampler
from activities.rollout.committing import CollectionDraft
from activities.rollout.group_loop import run_groups
from activities.rollout.parts import ProducerParts
from activities.rollout.plans import engine_wait_s, filters_ties
from activities.rollout.training_groups import TrainingGroups
from models.ports import StageProgress
from models.rollout import CollectRequest, RolloutCollection


class SequentialRollouts:
    """Collections of a run that is not fully async."""

    def __init__(self, parts: ProducerParts, sampler: GroupSampler) -> None:
        self._parts = parts
        self._spec = parts.spec
        self._gate = parts.gate
        self._sampler = sampler
        self._collecting: tuple[int, TrainingGroups] | None = None

    async def collect(self, request: CollectRequest) -> RolloutCollection:
        """Adopt the committed collection of this update and epoch, or sample and commit it."""
        parts = self._parts
        parts.source.forget(request.consumed_through)
        manifest = await parts.writer.find(request)
        if manifest is not None:
            found = await parts.writer.read(manifest)
            return parts.writer.adopt(request.update, manifest, found)
        async with parts.errors.watch():
            parts.source.give_back_from(request.update)
            groups = TrainingGroups(
                parts.source,
                self._sampler,
                self._gate,
                version=request.policy_version,
                batch_size=self._spec.training.rollout_batch_size,
                filter_zero_std=filters_ties(self._spec),
            )
            self._collecting = (request.update, groups)
            committed = False
            try:
                await parts.pool.wait_ready(engine_wait_s(self._spec))
                started = time.monotonic()
                await run_groups(groups, parts.health)
                draft = CollectionDraft(
                    groups.kept, groups.dropped, groups.tally, groups.max_requeues, started
                )
                collection = await parts.writer.commit(request, draft)
                committed = True
            finally:
                self._collecting = None
                if not committed:
                    groups.give_back()
            return collection

    def progress(self) -> StageProgress | None:
        """Samples done of the collection that runs; None without one."""
        if self._collecting is None:
            return None
        update, groups = self._collecting
        dropped = sum(groups.tally.dropped.values())
        return StageProgress(
            stage=f"collect {update}",
            done=groups.samples_done,
            total=self._spec.samples_per_collection,
            detail=f"{dropped} groups filtered" if dropped else "",
        )

    async def quiet(self, timeout_s: float) -> None:
        """Admit no training call; return when those that were admitted are over."""
        self._gate.pause()
        await self._gate.wait_idle(timeout_s)

    def reopen(self) -> None:
        """Admit training calls again."""
        self._gate.resume()
