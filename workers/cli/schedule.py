"""``schedule``: retraining on new data, on Temporal Schedules."""

import asyncio
import dataclasses
import os
import shlex
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import typer

from configs.load import load_run
from configs.paths import is_url
from configs.problem import configuration_error
from configs.render import run_request
from configs.retraining import require_usable
from models.retraining import RetrainingOutcome, RetrainingRequest
from workers.cli.config import Overrides, RunFile
from workers.cli.names import as_options
from workers.cli.output import equivalent, notice, out, print_json, quiet_or
from workers.cli.place import Place, ensure_place, find_place, is_named, stack_runs
from workers.cli.run import Address, Json
from workers.cli.schedule_times import Overlap, Timing
from workers.sources.inputs import find_engine_problems, find_input_problems

group = typer.Typer(no_args_is_help=True, help="Retraining on a schedule.")

PREFIX = "retrain/"
INPUT_FILE = "retrain.json"

Name = Annotated[
    str, typer.Argument(metavar="FILE|NAME", help="Run file, schedule id, or name of the run file.")
]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="PATTERN", help="Where new data appear; repeatable."),
]
Metric = Annotated[str, typer.Option(help="Figure of the held-out evaluation that decides.")]
Tolerance = Annotated[
    float, typer.Option(help="How much worse than its parent; below 0: how much better.")
]
Unscored = Annotated[
    float, typer.Option("--max-unscored", help="Largest share of samples without a score.")
]


@group.callback()
def _group() -> None:
    """Retraining on a schedule."""


@group.command("render")
def render(
    file: RunFile,
    override: Overrides = None,
    data: Data = None,
    metric: Metric = "eval/heldout",
    tolerance: Tolerance = 0.0,
    max_unscored: Unscored = 0.0,
) -> None:
    """Print the input for `temporal schedule create --type Retraining --input-file`."""
    request = _request(file, override or (), data or (), metric, tolerance, max_unscored)
    print_json(request.model_dump(mode="json"))


@group.command("create")
def create(
    file: RunFile,
    override: Overrides = None,
    data: Data = None,
    cron: Annotated[
        list[str] | None, typer.Option(metavar="LINE", help="`0 3 * * Mon`; repeatable.")
    ] = None,
    every: Annotated[
        list[str] | None, typer.Option(metavar="PERIOD[/OFFSET]", help="`6h`, `6h/5h`; repeatable.")
    ] = None,
    calendar: Annotated[
        list[str] | None,
        typer.Option(metavar="JSON", help='`{"dayOfWeek":"Mon","hour":"3"}`; repeatable.'),
    ] = None,
    time_zone: Annotated[
        str | None, typer.Option(metavar="TZ", help="Of --cron and --calendar; default UTC.")
    ] = None,
    overlap: Annotated[
        Overlap, typer.Option(help="While an earlier firing still runs.")
    ] = Overlap.SKIP,
    catch_up: Annotated[
        str, typer.Option(metavar="PERIOD", help="Firings missed for no longer are made up for.")
    ] = "1d",
    jitter: Annotated[
        str, typer.Option(metavar="PERIOD", help="Start at random within this time.")
    ] = "0s",
    note: Annotated[str, typer.Option(help="Shown with the schedule.")] = "",
    paused: Annotated[bool, typer.Option("--paused", help="Create it paused.")] = False,
    metric: Metric = "eval/heldout",
    tolerance: Tolerance = 0.0,
    max_unscored: Unscored = 0.0,
    address: Address = None,
) -> None:
    """Retrain on a schedule: train on new data, evaluate, promote what does not regress."""
    timing = Timing(
        cron or (), every or (), calendar or (), time_zone, jitter, catch_up, overlap, note, paused
    )
    timing.times()
    request = _request(file, override or (), data or (), metric, tolerance, max_unscored)
    _look_for_inputs(file, override or (), request.data, address)
    place = ensure_place(address, quiet_or(show=True))
    schedule_id = f"{PREFIX}{request.config['name']}"
    options = ["--metric", metric, f"--tolerance={tolerance:g}", f"--max-unscored={max_unscored:g}"]
    patterns = [word for pattern in data or () for word in ("--data", pattern)]
    rendered = ["perdure", "schedule", "render", file, *as_options(override or ())]
    equivalent(
        f"{shlex.join([*rendered, *patterns, *options])} > {INPUT_FILE} && "
        f"{_stock_create(place, schedule_id, timing)}"
    )
    from workers.cli import schedules

    _ask(address, lambda client: schedules.create(client, schedule_id, request, timing))
    root = request.config["output"]["root"]
    notice(f"{schedule_id} is scheduled; the export to serve will stand in {root}/latest.json")


@group.command("list")
def list_all(json: Json = False, address: Address = None) -> None:
    """Show every schedule of retraining."""
    from workers.cli import schedule_display, schedules

    if not json:
        equivalent(find_place(address).stock("schedule", "list"))

    async def gather(client: Any) -> list[schedules.ScheduleView]:
        return [view async for view in schedules.list_schedules(client)]

    found = _ask(address, gather)
    if json:
        print_json({"schedules": [_plain(view) for view in found]})
    else:
        schedule_display.show_list(out(), found)


@group.command("describe")
def describe(name: Name, json: Json = False, address: Address = None) -> None:
    """Show times, firings, decisions, and the export to serve."""
    from workers.cli import schedule_display, schedules

    schedule_id = schedule_id_of(name)
    if not json:
        stock = find_place(address).stock("schedule", "describe", "--schedule-id", schedule_id)
        equivalent(stock)
    view = _ask(address, lambda client: schedules.describe(client, schedule_id))
    files = schedule_display.read_root(view.request)
    if json:
        print_json({**_plain(view), **files})
    else:
        schedule_display.show(out(), view, files)


@group.command("trigger")
def trigger(
    name: Name,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the decision.")] = False,
    json: Json = False,
    address: Address = None,
) -> None:
    """Fire now."""
    from workers.cli import schedules

    schedule_id = schedule_id_of(name)
    if not json:
        place = find_place(address)
        equivalent(place.stock("schedule", "trigger", "--schedule-id", schedule_id))
    if not wait:
        _ask(address, lambda client: schedules.trigger(client, schedule_id))
        notice(f"{schedule_id} fires")
        return
    outcome: RetrainingOutcome = _ask(
        address, lambda client: schedules.trigger_and_wait(client, schedule_id)
    )
    if json:
        print_json(outcome.model_dump(mode="json"))
    else:
        words = outcome.decision.value.replace("_", " ")
        out().print(f"{outcome.firing}: {words}: {outcome.reason}", markup=False, soft_wrap=True)


@group.command("pause")
def pause(
    name: Name,
    note: Annotated[str, typer.Option(help="Why; replaces the note.")] = "paused",
    address: Address = None,
) -> None:
    """Fire no more until unpaused; a firing that runs goes on."""
    _toggle(name, note, address, paused=True)


@group.command("unpause")
def unpause(
    name: Name,
    note: Annotated[str, typer.Option(help="Why; replaces the note.")] = "unpaused",
    address: Address = None,
) -> None:
    """Fire again."""
    _toggle(name, note, address, paused=False)


@group.command("delete")
def delete(name: Name, address: Address = None) -> None:
    """Delete the schedule; a firing that runs goes on, and all files stay."""
    from workers.cli import schedules

    schedule_id = schedule_id_of(name)
    stock = find_place(address).stock("schedule", "delete", "--schedule-id", schedule_id)
    equivalent(stock)
    _ask(address, lambda client: schedules.delete(client, schedule_id))
    notice(f"{schedule_id} is deleted")


def schedule_id_of(text: str) -> str:
    """The schedule that ``text`` means: a run file's, one by its id, or one by its name."""
    if text.startswith(PREFIX):
        return text
    if text.endswith((".toml", ".json")) or os.path.isfile(text):
        return f"{PREFIX}{load_run(text).spec.name}"
    return f"{PREFIX}{text}"


def _stock_create(place: Place, schedule_id: str, timing: Timing) -> str:
    return place.stock(
        *("schedule", "create", "--schedule-id", schedule_id, "--workflow-id", schedule_id),
        *("--type", "Retraining", "--task-queue", "perdure-control"),
        *("--input-file", INPUT_FILE, *timing.stock()),
    )


def _toggle(name: str, note: str, address: str | None, *, paused: bool) -> None:
    from workers.cli import schedules

    schedule_id = schedule_id_of(name)
    flag = "--pause" if paused else "--unpause"
    words = ("schedule", "toggle", "--schedule-id", schedule_id, flag, "--reason", note)
    equivalent(find_place(address).stock(*words))
    _ask(address, lambda client: schedules.pause(client, schedule_id, note, paused=paused))
    notice(f"{schedule_id} {'is paused' if paused else 'fires again'}")


def _request(
    file: str,
    overrides: Sequence[str],
    patterns: Sequence[str],
    metric: str,
    tolerance: float,
    max_unscored: float,
) -> RetrainingRequest:
    loaded = load_run(file, overrides)
    request = RetrainingRequest(
        **run_request(loaded),
        data=tuple(each if is_url(each) else os.path.abspath(each) for each in patterns),
        metric=metric,
        tolerance=tolerance,
        max_unscored_fraction=max_unscored,
    )
    require_usable(request)
    return request


def _look_for_inputs(
    file: str, overrides: Sequence[str], patterns: Sequence[str], address: str | None
) -> None:
    """Refuse what each firing would end on; its training data are those that it will find."""
    from activities.storage.patterns import find_files  # fsspec is slow to import

    for pattern in patterns:
        if not find_files(pattern):
            notice(f"perdure: warning: --data {pattern}: no file matches yet")
    if is_named(address):
        return
    spec = load_run(file, overrides).spec
    data = spec.data.model_copy(update={"prompt_data": None})
    spec = spec.model_copy(update={"data": data})
    problems = find_input_problems(spec)
    if not stack_runs():
        problems += find_engine_problems(spec)
    if problems:
        raise configuration_error(file, problems)


def _plain(view: Any) -> dict[str, Any]:
    plain = dataclasses.asdict(dataclasses.replace(view, request=None))
    plain.pop("request")
    return plain


def _ask(address: str | None, call: Callable[[Any], Awaitable[Any]]) -> Any:
    """The answer of ``call`` with a client of the server that is meant."""
    # Temporal's client is imported where a server is talked to.
    from workers.cli.server import connect_to

    place = find_place(address)

    async def ask() -> Any:
        return await call(await connect_to(place))

    return asyncio.run(ask())
