"""``analyze``: what a finished run's files say about its speed."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from activities.storage import layout
from workers.cli.names import root_of
from workers.cli.output import notice, out, print_json

group = typer.Typer(no_args_is_help=True, help="Measure a finished run from its files.")

Root = Annotated[
    str, typer.Argument(metavar="ROOT|RUN_FILE", help="The run's output.root, or its run file.")
]
Incomplete = Annotated[
    bool,
    typer.Option(
        "--allow-incomplete",
        help="Also take a run that is not complete or did work again: last tries count.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Report = dict[str, Any]
Warmup = Annotated[int, typer.Option(help="First updates that are not measured.")]


@group.callback()
def _group() -> None:
    """Measure a finished run from its files."""


class Analysis(NamedTuple):
    """One command. All take the same arguments and deliver in the same way."""

    name: str
    purpose: str
    warmup: int
    """Updates that are not measured by default."""
    written: str
    """The file under the root."""
    table: Callable[[Report], Table]


def _command(analysis: Analysis) -> Callable[..., None]:
    def command(
        root: Root,
        warmup: Warmup = analysis.warmup,
        allow_incomplete: Incomplete = False,
        json: Json = False,
    ) -> None:
        measure = _measures()[analysis.name]
        report = measure(root_of(root), warmup, allow_incomplete=allow_incomplete)
        _deliver(report, analysis.written, json)
        if not json:
            out().print(analysis.table(report))

    return command


def _measures() -> dict[str, Callable[..., Report]]:
    # pyarrow and fsspec are slow to import; other verbs do without them.
    from activities.analysis import capacity, occupancy, throughput

    return {
        "throughput": throughput.analyze,
        "capacity": capacity.measurements,
        "occupancy": occupancy.analyze,
    }


def _deliver(report: Report, rel: str, json: bool) -> None:
    """Write ``report`` under its root, and print it when ``json``."""
    from activities.storage.store import Store

    store = Store(report["root"])
    store.write_json(rel, report)
    if json:
        print_json(report, indent=2)
    else:
        notice(f"written: {store.root}/{rel}")


def _throughput_table(report: Report) -> Table:
    ending = "stopped at its soft deadline" if report["stopped_for_time"] else "ran to its horizon"
    if not report["end_to_end_passed"]:
        ending = f"{report['workflow']['status']}, not complete"
    updates = (
        f"{report['measured_updates']} measured of {report['completed_updates']} "
        f"({report['planned_updates']} planned, warmup {report['warmup_updates']})"
    )
    rows = {"run": ending, "updates": updates}
    for stage, seconds in report["median_seconds"].items():
        rows[f"median {stage}"] = f"{seconds:.3f} s"
    rows["response tokens per second"] = f"{report['useful_response_tokens_per_second']:,.1f}"
    rows["trainer waited"] = _share(report["trainer_wait_fraction"])
    rows["discarded tokens"] = _share(report["discarded_token_fraction"])
    rows["tokens of the current policy"] = _share(report["current_policy_token_fraction"])
    unused = report["terminal_unused_work"]
    rows["unused at the end"] = (
        "-" if unused is None else f"{unused['response_tokens']['remaining']:,} response tokens"
    )
    return _table(rows)


def _capacity_table(report: Report) -> Table:
    """Medians over the warm updates that know a value."""
    warm = [row for row in report["rows"] if row["is_warm"]]
    names = {name: None for row in warm for name in row if not name.endswith("_coverage")}
    rows = {"warm updates": str(len(warm))}
    for name in sorted(name for name in names if "/" in name):
        known = [row[name] for row in warm if name in row]
        missing = f"  (known in {len(known)})" if len(known) < len(warm) else ""
        rows[name] = f"{median(known):,.4g}{missing}"
    return _table(rows)


def _occupancy_table(report: Report) -> Table:
    table = Table("series", "coverage", "mean", "p95", "largest", "empty", box=None)
    series = [*report["pipeline"].items()]
    for url, engine in report["engines"].items():
        series += [(f"{url} {each['name']}", each) for each in engine["series"]]
    for node, devices in report["hardware"].items():
        for device in devices:
            place = f"{node} GPU {device['index']}"
            series += [(f"{place} {name}", each) for name, each in device["metrics"].items()]
    known = [(name, summary) for name, summary in series if summary["coverage"]]
    for name, summary in known:
        table.add_row(name, *_cells(summary))
    if len(known) < len(series):
        table.caption = (
            f"{len(series) - len(known)} series were never seen; "
            "only fully async runs tell of pipeline and queue"
        )
    return table


def _cells(summary: Mapping[str, Any]) -> list[str]:
    values = (summary[name] for name in ("mean", "p95", "maximum"))
    numbers = ["-" if value is None else f"{value:,.4g}" for value in values]
    return [_share(summary["coverage"]), *numbers, _share(summary["empty_fraction"])]


def _table(rows: Mapping[str, str]) -> Table:
    table = Table(box=None, show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


_ANALYSES = (
    Analysis(
        "throughput",
        "Times of updates, waits of the trainer, delivered and discarded tokens, unused work.",
        3,
        layout.THROUGHPUT_ANALYSIS,
        _throughput_table,
    ),
    Analysis(
        "capacity",
        "Token rates and hardware use of every update, where trainer and engines are apart.",
        6,
        layout.CAPACITY_ANALYSIS,
        _capacity_table,
    ),
    Analysis(
        "occupancy",
        "How busy pipeline, engines and GPUs were, weighted by time.",
        6,
        layout.OCCUPANCY_ANALYSIS,
        _occupancy_table,
    ),
)
for _each in _ANALYSES:
    _help = f"{_each.purpose}\n\nWrites `{_each.written}` under the root."
    group.command(_each.name, help=_help)(_command(_each))
