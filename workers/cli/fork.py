"""``fork``: a new run from a checkpoint of another."""

import asyncio
import shlex
from pathlib import Path
from typing import Annotated

import typer

from activities.storage import layout
from configs.fork import forked_run
from configs.load import load_run
from configs.paths import is_url
from models.errors import ConfigurationError
from workers.cli.config import Overrides
from workers.cli.names import is_run_file, run_id_of
from workers.cli.output import equivalent, notice
from workers.cli.place import Place, ensure_place
from workers.cli.run import Address, start_line


def fork(
    source: Annotated[
        str, typer.Argument(metavar="FILE|RUN|ROOT", help="Run to fork; it is not touched.")
    ],
    at: Annotated[
        int, typer.Option("--at", metavar="UPDATES", help="Finished updates to begin with.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="ROOT", help="Output root of the new run; its last part is its name."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the new run.")] = None,
    override: Overrides = None,
    address: Address = None,
    start: Annotated[bool, typer.Option(help="Start the new run.")] = True,
) -> None:
    """Make a new run that begins at a checkpoint of another one, and start it.

    Model, optimizer state, counters, data cursor and ledger are those of the checkpoint.
    """
    root = _root_of_files(source)
    if root is None:
        root = _root_of_server(source, ensure_place(address, notice))
    from workers.cli import artifacts  # fsspec is slow to import

    recorded = artifacts.read_json(root, layout.RESOLVED_CONFIG)
    if not isinstance(recorded, dict):
        raise ConfigurationError(
            f"{root} has no readable {layout.RESOLVED_CONFIG}; name the run file, or the output "
            "root, of a run that has a checkpoint"
        )
    target = to if is_url(to) else str(Path(to).expanduser().absolute())
    loaded = forked_run(recorded, name or Path(target).name, target, override or (), at)
    # Reads Parquet, which is slow to import; other verbs do without it.
    from activities.forking import fork as fork_run
    from activities.forking import plan_fork, require_place
    from activities.storage.store import Store

    require_place(target)
    place = ensure_place(address, notice) if start else None
    made = fork_run(Store(root), loaded, plan_fork(Store(root), at))
    file = f"{target}/{layout.RESOLVED_CONFIG}"
    notice(f"{made.run_id} forked from {made.source_run_id} after {at} updates: {target}")
    if place is None:
        notice(f"start it: {shlex.join(['perdure', 'run', file])}")
        return
    equivalent(start_line(place, loaded.spec, shlex.quote(file)))
    # Temporal's client is imported where a server is talked to.
    from workers.cli.session import Session

    session = Session(load_run(file), place, again=[file], as_json=False, take_over=False)
    asyncio.run(session.run(follow=False))


def _root_of_files(source: str) -> str | None:
    """The output root that a run file or a folder means; none for a run's id or name."""
    if is_run_file(source):
        return load_run(source).spec.output.root
    return source if is_url(source) or Path(source).is_dir() else None


def _root_of_server(source: str, place: Place) -> str:
    """The output root of the run with the id or name ``source``, as its server knows it."""
    # Temporal's client is imported where a server is talked to.
    from workers.cli.server import connect_to, look

    run_id = run_id_of(source)

    async def ask() -> str:
        view = await look(await connect_to(place), run_id)
        return str(view.memo.get("root") or "") if view else ""

    root = asyncio.run(ask())
    if not root:
        raise ConfigurationError(
            f"{run_id}: the server knows no such run, or not its root; name its run file or root"
        )
    return root
