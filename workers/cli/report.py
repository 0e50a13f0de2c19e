"""``report``: a run as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from workers.cli.names import root_of
from workers.cli.output import out, print_json


def report(
    run_or_root: Annotated[
        str, typer.Argument(metavar="ROOT|RUN_FILE", help="The run's output.root, or its run file.")
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="FILE", help="Where to write; default ROOT/report.html."),
    ] = None,
    responses: Annotated[
        int, typer.Option(min=0, max=100, help="Most responses that are shown token by token.")
    ] = 24,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write what a run did as one HTML page that needs no server, script or other file.

    Reads files only, so the run may be over, killed or going on. Everything from the run is escaped
    and credentials are redacted; responses and prompts are shown as they are.
    """
    # pyarrow, fsspec and the template engine are slow to import; other verbs do without them.
    from workers.report.page import write_report

    path, num_bytes = write_report(root_of(run_or_root), output, responses)
    if json:
        print_json({"path": path, "bytes": num_bytes})
    else:
        link = f"file://{path}" if Path(path).is_absolute() else path
        out().print(f"{link} ({num_bytes / 1e6:.2f} MB)", markup=False, soft_wrap=True)
