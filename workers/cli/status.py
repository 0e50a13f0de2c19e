"""``status``: runs, their actors, the embedded stack; of one run, whether it is complete."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from activities.storage import layout
from configs.load import Loaded, load_run
from models.errors import ConfigurationError, RequestRefused
from workers.cli.config import Overrides
from workers.cli.errors import FAILED
from workers.cli.names import PREFIX, run_id_of
from workers.cli.output import equivalent, notice, out, print_json
from workers.cli.place import Place, find_place, is_named
from workers.cli.run import Address
from workers.local_stack import StackStatus, stack_status

_NO_SERVER = "no Temporal server is named and the embedded stack is not running (perdure up)"


@dataclass(frozen=True, slots=True)
class Subject:
    """The run that a command line names."""

    run_id: str
    """Empty when only its root is known."""
    loaded: Loaded | None = None
    root: str = ""
    """Set when the run was named by its root: then no server is asked."""


def status(
    run_name: Annotated[
        str | None, typer.Argument(metavar="[FILE|RUN|ROOT]", help="One run; default: all.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every count, marker and checksum of the run.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    follow: Annotated[bool, typer.Option(help="Follow the run until it ends.")] = False,
    override: Overrides = None,
    address: Address = None,
) -> None:
    """Show runs with their actors, and the processes of the embedded stack.

    One run, named by its run file, its id, or its root (then only files are asked), is shown with
    its current attempts. With --verify the exit code is 0 only if it is proved complete.
    """
    subject = find_subject(run_name, override or ()) if run_name else None
    for option, chosen in (("--follow", follow), ("--verify", verify)):
        if chosen and subject is None:
            raise ConfigurationError(f"{option} needs a run: perdure status FILE|RUN {option}")
    by_files = subject is not None and bool(subject.root)
    stack = None if by_files or is_named(address) else stack_status()
    asks = not by_files and (is_named(address) or _is_up(stack))
    if follow and subject is not None:
        if by_files:
            raise ConfigurationError(f"--follow needs the run's name, not its root {run_name}")
        following = _follow(find_place(address), subject.run_id, as_json=json, verify=verify)
        code = asyncio.run(following)
        if not verify:
            raise typer.Exit(code)
    knows_root = subject is not None and (by_files or subject.loaded is not None)
    if verify and not knows_root and not asks:
        find_place(address)  # raises: only a server can tell where the run's root is
    place = find_place(address) if asks else None
    if by_files:
        notice(f"{run_name}: by its files alone, no server is asked")
    elif not json:
        _say_how(place, subject.run_id if subject else None)
    report = asyncio.run(_report(place, subject, stack))
    if verify and subject is not None:
        report["verification"] = _verify(subject, report, place)
    _present(report, subject, as_json=json)
    if verify and not report["verification"]["complete"]:
        raise typer.Exit(FAILED)
    if subject and place and not report["runs"]:
        raise RequestRefused(f"{subject.run_id}: the server knows no such run")


def find_subject(text: str, overrides: Sequence[str] = ()) -> Subject:
    """What ``text`` names: a run file, a root with a run in it, a run id, or a name.

    Raises:
        ConfigurationError: the run file is missing or wrong, or overrides have none to change.
    """
    is_file = text.endswith((".toml", ".json")) or Path(text).is_file()
    if overrides and (text.startswith(PREFIX) or not is_file):
        raise ConfigurationError(f"--set changes a run file, and {text} is none")
    if text.startswith(PREFIX):
        return Subject(text)
    if "://" in text or (Path(text) / layout.WORKFLOW_JSON).is_file():
        return Subject("", root=text)
    if is_file:
        loaded = load_run(text, overrides)
        return Subject(loaded.spec.run_id, loaded)
    return Subject(run_id_of(text))


async def _report(
    place: Place | None, subject: Subject | None, stack: StackStatus | None
) -> dict[str, Any]:
    # Temporal's client is imported where a server is talked to.
    from workers.cli.overview import overview
    from workers.cli.status_details import add_details, from_files

    if subject is not None and subject.root:
        report: dict[str, Any] = {"runs": [from_files(subject.root)], "processes": []}
    else:
        report = await overview(place, subject.run_id if subject else None, stack)
    if subject is not None and report["runs"]:
        await add_details(report["runs"][0], place, subject.loaded)
    return report


def _verify(subject: Subject, report: dict[str, Any], place: Place | None) -> dict[str, Any]:
    # What reads Parquet is slow to import; other verbs do without it.
    from workers.cli.status_verify import verify_run

    run = report["runs"][0] if report["runs"] else None
    if subject.root:
        return verify_run("", subject.root, None, run, "")
    root = run["root"] if run else ""
    if not root and subject.loaded is not None:
        root = subject.loaded.spec.output.root
    unasked = _NO_SERVER if place is None else None
    return verify_run(subject.run_id, root, subject.loaded, run, unasked)


def _present(report: dict[str, Any], subject: Subject | None, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    from workers.cli.overview import show_overview
    from workers.cli.status_details import show_details

    show_overview(out(), report)
    if subject is not None and report["runs"]:
        show_details(out(), report["runs"][0])
    if subject is not None and "verification" in report:
        from workers.cli.status_verify import show_verification

        show_verification(out(), subject.run_id or subject.root, report["verification"])


async def _follow(place: Place, run_id: str, *, as_json: bool, verify: bool) -> int:
    """Follow to the end; with ``verify`` quietly, because a report comes after it."""
    from workers.cli.server import connect_to
    from workers.cli.session import follow_to_end, wait_for

    if not verify:
        return await wait_for(place, run_id, as_json=as_json)
    ending = await follow_to_end(await connect_to(place), run_id, "", place, as_json=as_json)
    return ending.exit_code


def _is_up(stack: StackStatus | None) -> bool:
    """Whether the embedded Temporal server runs; without it nobody knows about runs."""
    return stack is not None and any(
        process.name == "temporal" and process.alive for process in stack.processes
    )


def _say_how(place: Place | None, run_id: str | None) -> None:
    if place is None:
        notice(_NO_SERVER)
    elif run_id is None:
        equivalent(place.stock("workflow", "list", "--query", 'WorkflowType="Training"'))
    else:
        query = ("workflow", "query", "--workflow-id", run_id, "--type", "progress")
        equivalent(place.stock(*query, "-o", "json"))
