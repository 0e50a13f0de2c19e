"""From finished groups to a committed collection: a whole batch is acknowledged, or none of it."""

import asyncio
import time
from contextlib import suppress

import structlog

from activities.rollout.committing import CollectionDraft
from activities.rollout.completed import CompletedQueue, FinishedGroup
from activities.rollout.consumption import Consumption
from activities.rollout.free_run import FreeRun
from activities.rollout.parts import ProducerParts
from activities.rollout.queue_metrics import PREFIX, QueueMetrics
from activities.rollout.selection import Selection, Window
from activities.rollout.siblings import consumed_siblings
from activities.rollout.summary import SampledTally
from models.rollout import CollectRequest, RolloutCollection

SILENCE_S = 30.0
"""A collection that waits so long for a group says so."""

_log = structlog.get_logger(__name__)


class BatchAssembly:
    """Takes batches of ``training.rollout_batch_size`` groups, in order of completion.

    Groups of a batch that does not come about return to the front of the queue, and what was
    dropped meanwhile is named by the next collection.
    """

    def __init__(
        self,
        parts: ProducerParts,
        run: FreeRun,
        completed: CompletedQueue,
        consumption: Consumption,
        selection: Selection,
        metrics: QueueMetrics,
    ) -> None:
        self._parts = parts
        self._size = parts.spec.training.rollout_batch_size
        self._run = run
        self._completed = completed
        self._consumption = consumption
        self._selection = selection
        self._metrics = metrics
        self._batch: list[FinishedGroup] = []
        self._window_began = time.monotonic()

    @property
    def num_taken(self) -> int:
        """Groups taken for the batch in the making."""
        return len(self._batch)

    def begin_window(self) -> None:
        """Sampling for the next collection begins now."""
        self._window_began = time.monotonic()

    def discard_window(self) -> None:
        """What was finished since the last collection counts in none; the next window begins."""
        self._selection.take()
        self._metrics.collect(0, [])
        self.begin_window()

    async def collect(self, request: CollectRequest) -> RolloutCollection:
        """Wait for a batch and commit it.

        Raises:
            PerdureError: what ended the worker, or what the commit failed on.
        """
        try:
            waited_s = await self._fill()
            return await self._commit(request, waited_s)
        finally:
            self._completed.give_back(self._batch)
            self._batch.clear()

    async def _fill(self) -> float:
        """Fill the batch; return how long that took, in seconds."""
        began = time.monotonic()
        while len(self._batch) < self._size:
            self._batch.append(await self._next())
            if len(self._batch) == self._size:
                # A publication may have ended since the first of them was taken.
                self._batch[:] = self._consumption.still_fresh(self._batch)
        waited_s = time.monotonic() - began
        self._metrics.waited(waited_s)
        return waited_s

    async def _next(self) -> FinishedGroup:
        silent_since = time.monotonic()
        while True:
            await self._run.require_running()
            finished = self._consumption.take()
            self._run.wake()  # there is room in the queue, or a prompt to sample again
            if finished is not None:
                return finished
            self._run.news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_S):
                    await self._run.news.wait()
            silence_s = time.monotonic() - silent_since
            if silence_s >= SILENCE_S:
                _log.warning(
                    "no_group_completed",
                    seconds=round(silence_s),
                    groups_in_the_making=self._run.in_flight.groups,
                    holds=sorted(self._run.holds),
                )

    async def _commit(self, request: CollectRequest, waited_s: float) -> RolloutCollection:
        window = self._selection.take()
        draft = self._draft(window, waited_s)
        committed = False
        try:
            collection = await self._parts.writer.commit(request, draft)
            committed = True
        finally:
            if not committed:
                self._parts.source.release(draft.group_indices)
                self._selection.give_back(window)
                self._metrics.give_back()
        self._batch.clear()
        self.begin_window()
        return collection

    def _draft(self, window: Window, waited_s: float) -> CollectionDraft:
        ages = [self._consumption.age(finished) for finished in self._completed]
        for finished in self._batch:
            self._metrics.delivered(finished.group, self._consumption.age(finished))
        batch = sorted(self._batch, key=lambda each: each.draw.group_index)
        groups = [finished.group for finished in batch]
        tally = SampledTally()
        tally.merge(window.tally)
        for group in groups:
            tally.add(group, None)
        queue_metrics = {
            **self._metrics.collect(len(ages), ages),
            **consumed_siblings(groups),
            **self._parts.health.metrics(),
            f"{PREFIX}max_stale_requeues": float(self._parts.source.most_stale),
        }
        return CollectionDraft(
            groups=groups,
            dropped=[window.dropped[index] for index in sorted(window.dropped)],
            tally=tally,
            max_requeues=max(finished.draw.requeues for finished in batch),
            started=self._window_began,
            queue_metrics=queue_metrics,
            wait_seconds=waited_s,
        )
