"""``up``, ``down``, ``worker control|gpu``: the embedded stack and worker processes."""

import os
from typing import Annotated

import typer

from workers.cli.output import notice, out, print_json, quiet_or
from workers.local_stack import ensure_stack, stop_stack

worker_group = typer.Typer(no_args_is_help=True, help="Run a worker process in the foreground.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON line.")]


def up(json: Json = False) -> None:
    """Bring the embedded stack up: Temporal, Ray, a control worker, a GPU worker."""
    info = ensure_stack(notice=quiet_or(not json))
    if json:
        print_json(info.model_dump(mode="json"))
        return
    for name, value in (
        ("Temporal", info.temporal_address),
        ("Web UI", info.temporal_ui),
        ("Ray", info.ray_address),
        ("state", info.state_dir),
        ("logs", str(info.log_dir)),
    ):
        out().print(f"{name:9} {value}", markup=False, soft_wrap=True)


def down() -> None:
    """Stop the embedded stack. Open runs go on when it is up again."""
    notice("the embedded stack is stopped" if stop_stack() else "no embedded stack was running")


@worker_group.command("control")
def control() -> None:
    """Serve workflows and light activities; needs Temporal only."""
    # Worker modules bring Temporal's client, Ray and torch with them.
    from workers.control import main

    main()


@worker_group.command("gpu")
def gpu(
    fleet: Annotated[
        str | None, typer.Option(help="launch.fleet of the runs that come here; default: local.")
    ] = None,
) -> None:
    """Serve the activities of one Ray cluster; needs Temporal and Ray."""
    from workers.gpu import FLEET_VARIABLE, main

    if fleet is not None:
        os.environ[FLEET_VARIABLE] = fleet

    main()
