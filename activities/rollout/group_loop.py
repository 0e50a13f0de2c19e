"""Running many group attempts at once: submit, wait, retry, apply the stop rule.

    next_draws(count) --> attempts (one task a group) --> on_finished(draw, group)
          ^                     | known fault
          +---- on_fault <------+          unknown error: cancel and join all, raise

Waits for: a finished attempt, the end of the one-second back-off after a fault, or 0.5 s, after
which the stop rule is checked again. An attempt itself ends by its request deadline.
"""

import asyncio
from typing import Protocol

import structlog

from activities.rollout.recovery import POLL_S, ServingHealth, fatal_error
from models.errors import GenerationFault
from models.prompt import PromptDraw
from models.sample import SampleGroup

_log = structlog.get_logger(__name__)


class GroupWork(Protocol):
    """What to run: hands out draws, starts attempts, takes results."""

    def next_draws(self, num_active: int) -> list[PromptDraw]:
        """Draws to submit now, given how many attempts run; empty when nothing is to be added."""
        ...

    async def attempt(self, draw: PromptDraw) -> SampleGroup:
        """One attempt of a group."""
        ...

    def on_finished(self, draw: PromptDraw, group: SampleGroup) -> None:
        """Take a finished group."""
        ...

    def on_fault(self, draw: PromptDraw, fault: GenerationFault) -> None:
        """Give the draw back; it comes again from ``next_draws``."""
        ...

    def is_complete(self) -> bool:
        """Whether all that is wanted is there."""
        ...


async def run_groups(work: GroupWork, health: ServingHealth) -> None:
    """Run attempts until ``work`` is complete; nothing is left running on any exit.

    Raises:
        ServingFailureSustained: the stop rule.
        PerdureError: the first unknown error of an attempt.
    """
    active: dict[asyncio.Task[SampleGroup], PromptDraw] = {}
    try:
        while not work.is_complete():
            health.check()
            delay = health.submission_delay_s
            if delay == 0.0:
                for draw in work.next_draws(len(active)):
                    active[asyncio.ensure_future(work.attempt(draw))] = draw
            timeout = min(POLL_S, delay) if delay else POLL_S
            if active:
                done, _ = await asyncio.wait(
                    active, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                _settle(work, health, [(task, active.pop(task)) for task in done])
            else:
                await asyncio.sleep(timeout)
    finally:
        for task in active:
            task.cancel()
        await asyncio.gather(*active, return_exceptions=True)


def _settle(
    work: GroupWork,
    health: ServingHealth,
    finished: list[tuple[asyncio.Task[SampleGroup], PromptDraw]],
) -> None:
    """Deliver results in hand-out order; an unknown error is raised after the others are taken."""
    fatal: BaseException | None = None
    for task, draw in sorted(finished, key=lambda pair: pair[1].group_index):
        try:
            group = task.result()
        except GenerationFault as fault:
            health.record(faults=[fault.category])
            _log.warning(
                "group_requeued",
                group=draw.group_index,
                sample=draw.prepared_sample_id,
                category=fault.category,
                error=fault.message,
            )
            work.on_fault(draw, fault)
        except Exception as error:  # the group-attempt boundary: unknown means fatal
            fatal = fatal or fatal_error(error, draw)
        else:
            health.record(successes=1)
            work.on_finished(draw, group)
    if fatal is not None:
        raise fatal
    health.check()
