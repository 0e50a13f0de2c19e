"""``pause``, ``resume``, ``checkpoint``, ``stop``, ``cancel``: talk to a running run."""

import asyncio
import json as jsonlib
from typing import Annotated

import typer

from models.run import RunProgress, StopRequest
from workers.cli.names import run_id_of
from workers.cli.output import equivalent, notice
from workers.cli.place import Place, find_place
from workers.cli.run import Address, Run


def pause(run_name: Run, address: Address = None) -> None:
    """Pause in the update loop, after the running update; the fleet stays up.

    The admission gate stays open: a fully async producer samples on until its queue is full.
    """
    run_id, progress = _update(run_name, address, "pause")
    sampling = "and nothing is sampled meanwhile"
    if progress.plan is not None and progress.plan.fully_async:
        sampling = "while the admission gate stays open: sampling goes on until its queue is full"
    notice(
        f"{run_id} pauses in the update loop, not at the admission gate: the running update ends, "
        f"no other starts, {sampling}"
    )


def resume(run_name: Run, address: Address = None) -> None:
    """Go on after a pause."""
    run_id, _ = _update(run_name, address, "resume")
    notice(f"{run_id} goes on")


def checkpoint(run_name: Run, address: Address = None) -> None:
    """Commit a checkpoint after the running update."""
    run_id, _ = _update(run_name, address, "checkpoint_now")
    notice(f"{run_id} commits a checkpoint after the running update")


def stop(
    run_name: Run,
    reason: Annotated[str, typer.Option(help="Kept with the run.")] = "",
    no_checkpoint: Annotated[
        bool, typer.Option("--no-checkpoint", help="Give up what came after the last one.")
    ] = False,
    address: Address = None,
) -> None:
    """Stop after the running update, with a checkpoint; `run` resumes it."""
    request = StopRequest(reason=reason, checkpoint=not no_checkpoint)
    run_id, _ = _update(run_name, address, "stop", request)
    notice(f"{run_id} stops after the running update")


def cancel(run_name: Run, address: Address = None) -> None:
    """Cancel the workflow: like stop, and the run ends as canceled."""
    # Temporal's client is imported where a server is talked to.
    from workers.cli.server import connect_to, request_cancel

    run_id, place = run_id_of(run_name), find_place(address)
    equivalent(place.stock("workflow", "cancel", "--workflow-id", run_id))

    async def ask() -> None:
        await request_cancel(await connect_to(place), run_id)

    asyncio.run(ask())
    notice(f"{run_id} is being canceled")


def update_line(place: Place, run_id: str, name: str, request: StopRequest | None = None) -> str:
    """The stock command line that asks a run for ``name``."""
    given = [] if request is None else ["--input", jsonlib.dumps(request.model_dump(mode="json"))]
    words = ("--workflow-id", run_id, "--name", name, *given)
    return place.stock("workflow", "update", "execute", *words)


def _update(
    run_name: str, address: str | None, name: str, request: StopRequest | None = None
) -> tuple[str, RunProgress]:
    """Ask, having said how else; the run's id and its progress."""
    from workers.cli.server import connect_to, request_update

    run_id, place = run_id_of(run_name), find_place(address)
    equivalent(update_line(place, run_id, name, request))

    async def ask() -> RunProgress:
        return await request_update(await connect_to(place), run_id, name, request)

    return run_id, asyncio.run(ask())
