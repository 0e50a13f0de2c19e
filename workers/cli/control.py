"""``pause``, ``resume``, ``checkpoint``, ``stop``, ``cancel``: talk to a running run."""

import asyncio
import json as jsonlib
from typing import Annotated

import typer

from models.run import StopRequest
from workers.cli.names import run_id_of
from workers.cli.output import equivalent, notice
from workers.cli.place import find_place
from workers.cli.run import Address, Run


def pause(run_name: Run, address: Address = None) -> None:
    """Pause after the running update; the fleet stays up."""
    _update(run_name, address, "pause", "pauses after the running update")


def resume(run_name: Run, address: Address = None) -> None:
    """Go on after a pause."""
    _update(run_name, address, "resume", "goes on")


def checkpoint(run_name: Run, address: Address = None) -> None:
    """Commit a checkpoint after the running update."""
    _update(run_name, address, "checkpoint_now", "commits a checkpoint after the running update")


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
    _update(run_name, address, "stop", "stops after the running update", request)


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


def _update(
    run_name: str, address: str | None, name: str, effect: str, request: StopRequest | None = None
) -> None:
    from workers.cli.server import connect_to, request_update

    run_id, place = run_id_of(run_name), find_place(address)
    given = [] if request is None else ["--input", jsonlib.dumps(request.model_dump(mode="json"))]
    equivalent(
        place.stock(
            "workflow", "update", "execute", "--workflow-id", run_id, "--name", name, *given
        )
    )

    async def ask() -> None:
        await request_update(await connect_to(place), run_id, name, request)

    asyncio.run(ask())
    notice(f"{run_id} {effect}")
