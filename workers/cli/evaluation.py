"""``evaluation list|resubmit``: background evaluations by their receipts."""

import asyncio
from typing import Annotated

import typer

from models.evaluation import ReceiptStatus
from workers.cli.errors import FAILED
from workers.cli.names import root_of
from workers.cli.output import equivalent, notice, out, print_json
from workers.cli.place import find_place
from workers.cli.run import Address

group = typer.Typer(help="Background evaluations of a run.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON line.")]


@group.command("list")
def list_evaluations(
    run_or_root: Annotated[
        str, typer.Argument(metavar="RUN_FILE|ROOT", help="Run file, or the run's output.root.")
    ],
    json: Json = False,
) -> None:
    """Show every receipt of a run: how far its submission came, and its result."""
    # pyarrow and fsspec are slow to import; other verbs do without them.
    from workers.cli.receipts import damaged, show_receipts, summaries

    root = root_of(run_or_root)
    found = summaries(root)
    for problem in damaged(root):
        notice(f"perdure: warning: {problem}")
    if json:
        print_json({"root": root, "evaluations": found})
    else:
        show_receipts(out(), root, found)


@group.command()
def resubmit(
    receipt: Annotated[
        str, typer.Argument(metavar="RECEIPT", help="ROOT/evaluation/update-NNNNNNNN-KEY.json")
    ],
    json: Json = False,
    address: Address = None,
) -> None:
    """Evaluate the snapshot of a receipt again, under a new receipt and workflow.

    Exit code 1 unless it was submitted.
    """
    from workers.cli.receipts import prepare_resubmission, submit

    resubmission = prepare_resubmission(receipt)
    place = find_place(address)
    started = place.stock("workflow", "describe", "--workflow-id", resubmission.experiment_id)
    done = asyncio.run(submit(place, resubmission))
    if json:
        print_json(done.model_dump(mode="json"))
    elif done.status is ReceiptStatus.SUBMITTED:
        equivalent(started)
        notice(f"submitted as {done.experiment_id}")
        notice(f"receipt: {resubmission.order.run.root}/{done.receipt}")
    else:
        notice(f"not submitted: {done.error_type}: {done.error}")
    if done.status is not ReceiptStatus.SUBMITTED:
        raise typer.Exit(FAILED)
