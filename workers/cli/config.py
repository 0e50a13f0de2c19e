"""``validate``, ``plan``, ``config schema|reference|render``: run files without a server."""

import json
from pathlib import Path
from typing import Annotated

import typer

from configs.load import load_run
from configs.plan import build_plan
from configs.problem import configuration_error
from configs.reference import reference
from configs.render import run_request
from configs.schema import json_schema
from models.checkpoint import RewindRequest
from workers.cli.output import notice, print_json
from workers.cli.place import is_named
from workers.sources.inputs import find_engine_problems, find_input_problems

group = typer.Typer(no_args_is_help=True, help="Run files as other tools want them.")

RunFile = Annotated[str, typer.Argument(metavar="FILE", help="Run file, TOML or JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace one value (TOML); repeatable."),
]


def validate(
    file: RunFile,
    override: Overrides = None,
    inputs: Annotated[
        bool, typer.Option("--inputs/--no-inputs", help="Also look for its files on this machine.")
    ] = True,
) -> None:
    """Check a run file and everything it points to."""
    loaded = load_run(file, override or ())
    problems = find_input_problems(loaded.spec) if inputs else []
    if problems:
        raise configuration_error(file, problems)
    plan_of_run = build_plan(loaded)
    capacity = plan_of_run["runtime"]["async_capacity"]
    for warning in (*plan_of_run["warnings"], *capacity["warnings"]):
        notice(f"perdure: {file}: warning {warning['code']}: {warning['message']}")
    for problem in find_engine_problems(loaded.spec) if inputs and not is_named(None) else ():
        notice(f"perdure: {file}: warning no_sglang_here: {problem}")
    typer.echo(f"{file}: valid, {loaded.spec.run_id}, sha256 {loaded.sha256}")
    if gpus := plan_of_run["allocation"]["gpus"]:
        typer.echo(f"{file}: {loaded.spec.placement.mode} on {gpus['summary']}")


def plan(file: RunFile, override: Overrides = None) -> None:
    """Print what a run would do, as JSON; `runtime.async_capacity` is what it may hold."""
    print_json(build_plan(load_run(file, override or ())), indent=2)


@group.command("schema")
def schema(
    write: Annotated[
        Path | None, typer.Option("--write", metavar="PATH", help="Write to a file instead.")
    ] = None,
) -> None:
    """Print the JSON Schema of run files."""
    if write is None:
        print_json(json_schema(), indent=2)
        return
    write.write_text(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n")


@group.command("reference")
def reference_page(
    write: Annotated[
        Path | None, typer.Option("--write", metavar="PATH", help="Write to a file instead.")
    ] = None,
) -> None:
    """Print the reference of every key of a run file, as Markdown."""
    if write is None:
        typer.echo(reference(), nl=False)
        return
    write.write_text(reference())


@group.command("render")
def render(
    file: RunFile,
    override: Overrides = None,
    rewind_to: Annotated[
        int | None,
        typer.Option(metavar="UPDATES", help="The start goes back to that checkpoint first."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Of the rewind; kept with the run.")] = "",
) -> None:
    """Print the workflow's input for `temporal workflow start --type Training --input-file`."""
    rewind = None if rewind_to is None else RewindRequest(updates=rewind_to, reason=reason)
    print_json(run_request(load_run(file, override or ()), rewind))
