"""``audit``: what became of every prompt of a run, from its files alone."""

from typing import Annotated

import typer

from workers.cli.errors import FAILED
from workers.cli.names import root_of
from workers.cli.output import out, print_json


def audit(
    run_or_root: Annotated[
        str, typer.Argument(metavar="ROOT|RUN_FILE", help="The run's output.root, or its run file.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    prompts: Annotated[bool, typer.Option("--prompts", help="Show every prompt's life.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts that --prompts shows.")] = 100,
) -> None:
    """Account for every prompt drawn: trained, dropped, pending or missing.

    Reads files only, so the run may be over, killed or going on. Exit code 1 when a prompt is
    missing or consumed twice, or an update was applied twice or left no samples to read.
    """
    # pyarrow and fsspec are slow to import; other verbs do without them.
    from activities.analysis.audit import audit as audit_root
    from workers.cli.audit_report import as_json, chosen, life_json, show, show_lives

    books = audit_root(root_of(run_or_root))
    shown = chosen(books, limit) if prompts else []
    if json:
        lives = {"prompts": [life_json(life) for life in shown]} if prompts else {}
        print_json(as_json(books) | lives)
    else:
        if prompts:
            show_lives(out(), books, shown)
        show(out(), books)
    if not books.is_clean:
        raise typer.Exit(FAILED)
