"""``status``: runs, their actors, and the processes of the embedded stack."""

import asyncio
from typing import Annotated

import typer

from models.errors import ConfigurationError, RequestRefused
from workers.cli.names import run_id_of
from workers.cli.output import equivalent, notice, out, print_json
from workers.cli.place import Place, find_place, is_named
from workers.cli.run import Address
from workers.local_stack import StackStatus, stack_status


def status(
    run_name: Annotated[
        str | None, typer.Argument(metavar="[FILE|RUN]", help="One run; default: all.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    follow: Annotated[bool, typer.Option(help="Follow the run until it ends.")] = False,
    address: Address = None,
) -> None:
    """Show runs with their actors, and the processes of the embedded stack."""
    # Temporal's client is imported where a server is talked to.
    from workers.cli.overview import overview, show_overview
    from workers.cli.session import wait_for

    run_id = run_id_of(run_name) if run_name else None
    if follow and run_id is None:
        raise ConfigurationError("--follow needs a run: perdure status FILE|RUN --follow")
    stack = None if is_named(address) else stack_status()
    place = find_place(address) if is_named(address) or _is_up(stack) else None
    if follow and run_id is not None:
        raise typer.Exit(asyncio.run(wait_for(find_place(address), run_id, as_json=json)))
    if not json:
        _say_how(place, run_id)
    report = asyncio.run(overview(place, run_id, stack))
    if json:
        print_json(report)
    else:
        show_overview(out(), report)
    if run_id and place and not report["runs"]:
        raise RequestRefused(f"{run_id}: the server knows no such run")


def _is_up(stack: StackStatus | None) -> bool:
    """Whether the embedded Temporal server runs; without it nobody knows about runs."""
    return stack is not None and any(
        process.name == "temporal" and process.alive for process in stack.processes
    )


def _say_how(place: Place | None, run_id: str | None) -> None:
    if place is None:
        notice("no Temporal server is named and the embedded stack is not running (perdure up)")
    elif run_id is None:
        equivalent(place.stock("workflow", "list", "--query", 'WorkflowType="Training"'))
    else:
        query = ("workflow", "query", "--workflow-id", run_id, "--type", "progress")
        equivalent(place.stock(*query, "-o", "json"))
