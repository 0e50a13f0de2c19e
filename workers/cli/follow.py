"""Following a run to its end: polls the query ``progress``, outlasts server restarts."""

import asyncio
import time

from temporalio.client import Client
from temporalio.service import RPCError

from models.errors import ConfigurationError, ServiceUnreachable
from models.run import RunProgress, RunState
from workers.cli.display import Reporter
from workers.cli.pipeline import PipelineWatch
from workers.cli.server import RunView, look, progress_of
from workflows.options import CONTROL_QUEUE, fleet_queue

POLL_S = 0.5
DESCRIBE_S = 5.0
"""A closed workflow still answers queries: a terminated one is noticed this often."""
UNREACHABLE_LIMIT_S = 300.0
"""A server that is away for longer ends the following, never the run."""
SILENT_LIMIT_S = 6.0
"""Seconds without an answer of the workflow before the display says so."""


async def follow(
    client: Client, run_id: str, reporter: Reporter
) -> tuple[RunView, RunProgress | None]:
    """Show ``run_id`` until it is closed; returns its last description and progress.

    Raises:
        ConfigurationError: the server does not know the run.
        ServiceUnreachable: the server was away for five minutes.
    """
    last: RunProgress | None = None
    queue = CONTROL_QUEUE
    pipeline = PipelineWatch()
    answered = reached = described = time.monotonic()
    while True:
        note = ""
        try:
            progress = await progress_of(client, run_id)
            if _may_be_over(progress) or time.monotonic() - described > DESCRIBE_S:
                described = time.monotonic()
                view = await look(client, run_id)
                if view is None:
                    raise ConfigurationError(f"{run_id}: the server knows no such run")
                queue = view.task_queue
                if not view.is_open:
                    reporter.show(progress or last, "")
                    return view, progress or last
            reached = time.monotonic()
        except (ServiceUnreachable, RPCError):
            progress = None
        now = time.monotonic()
        if progress is not None:
            last, answered = progress, now
        if now - reached > SILENT_LIMIT_S:
            note = f"Temporal has not answered for {now - reached:.0f} s; the run's workers wait"
        elif now - answered > SILENT_LIMIT_S:
            note = f"{_who(queue)} has answered for {now - answered:.0f} s"
        if now - reached > UNREACHABLE_LIMIT_S:
            raise ServiceUnreachable(
                f"Temporal has been away for {UNREACHABLE_LIMIT_S:.0f} s; the run goes on when it "
                "is back, and the same command follows it again"
            )
        reporter.show(progress or last, note, pipeline.newest(progress))
        await asyncio.sleep(POLL_S)


def _who(queue: str) -> str:
    """Nobody of those who should serve ``queue``, and how to start one."""
    if queue == CONTROL_QUEUE:
        return "no control worker (perdure worker control)"
    fleet = queue.removeprefix(fleet_queue(""))
    return f"no worker of fleet {fleet!r} (perdure worker gpu --fleet {fleet}, beside its Ray)"


def _may_be_over(progress: RunProgress | None) -> bool:
    """Whether the workflow's own word does not settle that it goes on training."""
    return progress is None or progress.state is not RunState.TRAINING
