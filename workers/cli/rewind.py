"""``rewind``: go back to an earlier checkpoint, through the workflow."""

import asyncio
import shlex
from typing import Annotated

import typer

from configs.load import load_run
from models.checkpoint import RewindRequest
from models.run import StopRequest
from workers.cli.config import Overrides
from workers.cli.names import is_run_file, run_id_of
from workers.cli.output import notice
from workers.cli.place import ensure_place
from workers.cli.run import Address, Run

DEFAULT_WAIT_S = 3600.0
"""For the running update and its checkpoint."""


def rewind(
    run_name: Run,
    to: Annotated[
        int, typer.Option("--to", metavar="UPDATES", help="Finished updates to go back to.")
    ],
    reason: Annotated[str, typer.Option(help="Kept with the run.")] = "",
    no_checkpoint: Annotated[
        bool, typer.Option("--no-checkpoint", help="Give up what came after the last one.")
    ] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the running update may take.")
    ] = DEFAULT_WAIT_S,
    override: Overrides = None,
    address: Address = None,
) -> None:
    """Go back to an earlier checkpoint and train on from there.

    What was done since is set aside under ROOT/rewound, not deleted. A run that is going on is
    stopped first, with a checkpoint.
    """
    loaded = load_run(run_name, override or ()) if is_run_file(run_name) else None
    run_id = loaded.spec.run_id if loaded else run_id_of(run_name)
    place = ensure_place(address, notice)
    # Temporal's client is imported where a server is talked to.
    from workers.cli.rewind_session import RewindSession

    request = RewindRequest(updates=to, reason=reason)
    stop = StopRequest(reason=reason or f"rewind to {to} updates", checkpoint=not no_checkpoint)
    session = RewindSession(place, run_id, request, loaded, run_name, override or ())
    asyncio.run(session.run(stop, wait))
    notice(f"follow it: {shlex.join(['perdure', 'wait', run_id])}")
