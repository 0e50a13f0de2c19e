"""The free-running worker: keeps groups in the making and finished ones in the queue.

    source --draw--> attempts --> filter --> ready --> completed queue --> collect
       ^                |                      |            |
       |                |                      +-- waits while the queue is full: nothing new begins
       +--- fault, cancellation, too old ------+------------+

Waits for: a scored sample, an ended attempt, room in the queue, an opened admission, the end of the
one-second back-off after a fault, or 0.5 s, after which the stop rule is checked again.
"""

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

import structlog

from activities.rollout.completed import CompletedQueue, FinishedGroup
from activities.rollout.error_log import ErrorLog
from activities.rollout.in_flight import InFlight, Start
from activities.rollout.queue_metrics import QueueMetrics
from activities.rollout.recovery import POLL_S, ServingHealth, fatal_error
from activities.rollout.selection import Selection
from activities.rollout.source import PromptSource
from activities.wire.engine_pool import EnginePool
from models.errors import (
    ContractViolation,
    GenerationFault,
    PerdureError,
    ServingFailureSustained,
)
from models.prompt import PromptDraw
from models.sample import SampleGroup

_log = structlog.get_logger(__name__)


LAST_REPORT_S = 10.0
"""For a worker that failed to write what ended it."""


class Hold(StrEnum):
    """Why no new group begins."""

    PUBLICATION = "publication"
    EVALUATION = "evaluation"
    HORIZON = "horizon"
    """The run's last collection was taken."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be in the making. ``by_sample``: room counts in samples, else in groups."""

    groups: int
    samples_per_prompt: int
    by_sample: bool

    def has_room(self, groups: int, unfinished_samples: int) -> bool:
        """Whether one more group fits beside what runs."""
        if not self.by_sample:
            return groups < self.groups
        most = self.groups * self.samples_per_prompt
        return unfinished_samples + self.samples_per_prompt <= most


class FreeRun:
    """Runs from ``ensure`` to ``stop``; belongs to one event loop.

    Whatever ends it, every prompt is in exactly one place: the source, an attempt, ``ready``, the
    queue, or the dropped groups of the selection.
    """

    def __init__(
        self,
        *,
        budget: Budget,
        start: Start,
        source: PromptSource,
        completed: CompletedQueue,
        selection: Selection,
        metrics: QueueMetrics,
        health: ServingHealth,
        errors: ErrorLog,
        pool: EnginePool,
        engine_wait_s: float,
    ) -> None:
        self._budget = budget
        self._source = source
        self._completed = completed
        self._selection = selection
        self._metrics = metrics
        self._health = health
        self._errors = errors
        self._pool = pool
        self._engine_wait_s = engine_wait_s
        self._wake = asyncio.Event()
        self.in_flight = InFlight(start, budget.samples_per_prompt, self._wake.set)
        self.ready: deque[FinishedGroup] = deque()
        """Finished groups for which the queue has no room yet."""
        self.holds: set[Hold] = set()
        self.news = asyncio.Event()
        """Set when a group enters the queue and when the worker ends."""
        self.put_waited_s = 0.0
        """Seconds that finished groups waited for room, the wait that goes on not included."""
        self._blocked_since: float | None = None
        self._worker: asyncio.Task[None] | None = None
        self._ends = False  # on purpose
        self._lifecycle = asyncio.Lock()
        self._failure: BaseException | None = None
        self._forgiven: BaseException | None = None

    @property
    def is_running(self) -> bool:
        """Whether the worker lives and was not told to end."""
        return self._worker is not None and not self._worker.done() and not self._ends

    @property
    def owned_groups(self) -> int:
        """Groups that were drawn and are not in the queue yet."""
        return self.in_flight.groups + len(self.ready)

    @property
    def put_waits_s(self) -> float:
        """How long a finished group has waited for room now; 0.0 when none waits."""
        return 0.0 if self._blocked_since is None else time.monotonic() - self._blocked_since

    async def ensure(self) -> None:
        """Run, unless it does.

        Raises:
            PerdureError: what ended the worker since the last call; the next call starts it again.
        """
        async with self._lifecycle:
            if self.is_running:
                return
            await self._stop()
            self._raise_failure()
            self._ends = False
            self._worker = asyncio.ensure_future(self._work())
            self._worker.add_done_callback(self._on_end)

    async def require_running(self) -> None:
        """Return while the worker lives or was ended on purpose.

        Raises:
            PerdureError: what ended it; everything that it ran was joined.
        """
        worker = self._worker
        if self._failure is None and worker is not None and worker.done() and not self._ends:
            self._failure = ContractViolation("the producer's worker ended without an error")
        if self._failure is None:
            return
        if worker is not None:
            await asyncio.wait({worker}, timeout=LAST_REPORT_S)
        await self.stop()
        self._raise_failure()

    def end(self) -> None:
        """Ask everything that runs to end; ``stop`` waits for it."""
        self._ends = True
        if self._worker is not None:
            self._worker.cancel()
        self.in_flight.cancel()

    async def stop(self) -> None:
        """End the worker, join every attempt, give the prompts of unfinished groups back.

        Finished groups stay.

        Raises:
            ServiceUnreachable: an attempt does not end although the engines were told to.
        """
        async with self._lifecycle:
            await self._stop()

    def forgive(self) -> None:
        """Engines are others from now on; the stop rule may have ended the worker under the old."""
        self._health.start_over()
        if isinstance(self._failure, ServingFailureSustained):
            _log.warning("stop rule forgiven: engines were replaced", reason=str(self._failure))
            self._forgiven = self._failure

    def forget_failure(self) -> None:
        """The worker's end concerns nobody any more: its epoch is over."""
        self._failure = None

    def hold(self, why: Hold) -> None:
        """Begin no new group."""
        self.holds.add(why)

    def unhold(self, why: Hold) -> None:
        """Begin new groups again, unless something else holds them."""
        self.holds.discard(why)
        self._wake.set()

    def wake(self) -> None:
        """There is room, or a prompt to sample again."""
        self._wake.set()

    async def _stop(self) -> None:
        self.end()
        if self._worker is not None:
            await asyncio.wait({self._worker})
            self._worker = None
        await self.in_flight.join(self._pool.abort_all)
        failure = self._settle()
        self._failure = self._failure or failure

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        forgiven, self._forgiven = self._forgiven, None
        if failure is not None and failure is not forgiven:
            raise failure

    async def _work(self) -> None:
        async with self._errors.watch():
            try:
                await self._pool.wait_ready(self._engine_wait_s)
                while True:
                    self._health.check()
                    self._flush()
                    self._submit()
                    await self._change()
                    failure = self._settle()
                    if failure is not None:
                        raise failure
                    self._health.check()
            except PerdureError as error:
                self._failure = error  # nobody may take a group while it is being reported
                raise

    def _submit(self) -> None:
        """Begin as many groups as there is room for."""
        if self.holds or self.ready or self._completed.is_overfull:
            return
        if self._health.submission_delay_s:
            return
        running = self.in_flight
        while self._budget.has_room(running.groups, running.unfinished_samples):
            running.submit(self._source.draw(1)[0])

    async def _change(self) -> None:
        delay_s = self._health.submission_delay_s
        with suppress(TimeoutError):
            async with asyncio.timeout(min(POLL_S, delay_s) if delay_s else POLL_S):
                await self._wake.wait()
        self._wake.clear()

    def _settle(self) -> BaseException | None:
        """Take what ended, in hand-out order; return the first unknown error."""
        failed: list[int] = []
        unhurt: list[int] = []
        fatal: BaseException | None = None
        for ended in self.in_flight.take_ended():
            draw, task = ended.draw, ended.task
            if task.cancelled():
                self._metrics.aborted()
                unhurt.append(draw.group_index)
                continue
            error = task.exception()
            if error is None:
                fatal = self._finish(draw, task.result()) or fatal
            elif isinstance(error, GenerationFault):
                self._count_fault(draw, error)
                failed.append(draw.group_index)
            else:
                unhurt.append(draw.group_index)
                fatal = fatal or fatal_error(error, draw)
        self._source.requeue(failed)
        self._source.requeue(unhurt, failed=False)
        self._flush()
        return fatal

    def _finish(self, draw: PromptDraw, group: SampleGroup) -> BaseException | None:
        self._health.record(successes=1)
        try:
            keeps = self._selection.keeps(draw, group)
        except ContractViolation as error:
            return error
        if keeps:
            self.ready.append(FinishedGroup(draw, group))
        return None

    def _count_fault(self, draw: PromptDraw, fault: GenerationFault) -> None:
        self._health.record(faults=[fault.category])
        self._selection.add_fault(fault.category)
        _log.warning(
            "group_requeued",
            group=draw.group_index,
            sample=draw.prepared_sample_id,
            category=fault.category,
            error=fault.message,
        )

    def _flush(self) -> None:
        """Move finished groups into the queue while it has room."""
        while self.ready and self._completed.put(self.ready[0]):
            self.ready.popleft()
            self.news.set()
        if self.ready and self._blocked_since is None:
            self._blocked_since = time.monotonic()
        elif not self.ready and self._blocked_since is not None:
            self.put_waited_s += self.put_waits_s
            self._blocked_since = None

    def _on_end(self, worker: asyncio.Task[None]) -> None:
        """The worker ended: nothing of it goes on, and whoever waits for groups hears of it."""
        if not worker.cancelled():
            self._failure = worker.exception()
        self.in_flight.cancel()
        self.news.set()
