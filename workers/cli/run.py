"""``run``, ``start``, ``wait``: start a run or join the one that is there, and follow it."""

import asyncio
import shlex
from collections.abc import Sequence
from typing import Annotated

import typer

from configs.load import Loaded, load_run
from configs.problem import configuration_error
from configs.render import start_words
from configs.run import RunSpec
from workers.cli import errors
from workers.cli.config import Overrides, RunFile
from workers.cli.names import as_options, run_id_of
from workers.cli.output import equivalent, notice, quiet_or
from workers.cli.place import Place, ensure_place, find_place, is_named, stack_runs
from workers.sources.inputs import find_engine_problems, find_input_problems

Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Temporal server; default: TEMPORAL_ADDRESS."),
]
Json = Annotated[bool, typer.Option("--json", help="End with one JSON line on standard output.")]
TakeOver = Annotated[
    bool, typer.Option("--take-over", help="Adopt an output root that another server owned.")
]
Run = Annotated[str, typer.Argument(metavar="FILE|RUN", help="Run file, run id, or name.")]


def run(
    file: RunFile,
    override: Overrides = None,
    json: Json = False,
    address: Address = None,
    detach: Annotated[bool, typer.Option(help="Do not follow; leave once it is started.")] = False,
    take_over: TakeOver = False,
) -> None:
    """Run a run file and follow it: start, resume, or join the run that is there.

    Without a Temporal address this brings up the embedded stack: Temporal, Ray and workers on
    this machine. Ctrl-C stops following, not the run.
    """
    loaded = load_run(file, override or ())
    if not is_named(address):
        problems = find_input_problems(loaded.spec)
        if not stack_runs():  # else its workers have an environment of their own
            problems += find_engine_problems(loaded.spec)
        if problems:
            raise configuration_error(file, problems)
    place = ensure_place(address, quiet_or(not json))
    if not json:
        _say_how(loaded, place, override or ())
    # Temporal's client is imported where a server is talked to: `validate` does without it.
    from workers.cli.session import Session

    again = [file, *as_options(override or ())]
    session = Session(loaded, place, again=again, as_json=json, take_over=take_over)
    try:
        raise typer.Exit(asyncio.run(session.run(follow=not detach)))
    except KeyboardInterrupt:
        command = shlex.join(["perdure", "run", *again])
        notice(f"\ndetached; {loaded.spec.run_id} goes on. Follow it again: {command}")
        notice(f"stop it: perdure stop {loaded.spec.name}")
        raise typer.Exit(errors.INTERRUPTED) from None


def start(
    file: RunFile,
    override: Overrides = None,
    json: Json = False,
    address: Address = None,
    take_over: TakeOver = False,
) -> None:
    """Start a run and leave: `run --detach`."""
    run(file, override, json, address, True, take_over)


def wait(
    run_name: Run,
    json: Json = False,
    address: Address = None,
) -> None:
    """Follow a run until it ends; exits like `run`."""
    from workers.cli.session import wait_for

    run_id = run_id_of(run_name)
    place = find_place(address)
    if not json:
        equivalent(place.stock("workflow", "result", "--workflow-id", run_id))
    raise typer.Exit(asyncio.run(wait_for(place, run_id, as_json=json)))


def start_line(place: Place, spec: RunSpec, rendered: str) -> str:
    """The stock command lines that start a run; ``rendered`` is what is to be rendered."""
    command = place.stock(*start_words(spec.run_id, "run.json", spec.launch.timeout_s))
    return f"perdure config render {rendered} > run.json && {command}"


def _say_how(loaded: Loaded, place: Place, overrides: Sequence[str]) -> None:
    file = shlex.join([loaded.path, *as_options(overrides)])
    equivalent(start_line(place, loaded.spec, file))
