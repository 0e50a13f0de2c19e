"""What ``scripts/gpu_scale.sh`` measured, as Markdown, and whether the goals hold.

    python benchmarks/scaling_goals.py FOLDER

Reads the JSON file of every part in FOLDER, prints a table for each and at the end one of goals.
Exit code 0 only if every goal holds that is judged. Goals of speed are not judged on a CPU, nor
what a machine of two GPUs has nothing to compare with; a goal whose part left nothing does not
hold.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = ("trainer", "engines", "publication", "async", "kill", "colocated")
TRAINER_HEAD = (
    "| trainer ranks | compiled | tokens an update | s | tokens/s | MFU | efficiency | peak GiB "
    "| loss gap | loss moved by | gradient norm, relative gap |"
)
ENGINE_HEAD = "| engines | GPUs each | at once each | tokens/s | of N x one | shares of requests |"
PUBLICATION_HEAD = (
    "| engines | trainer ranks | by | MB | s (first) | of it loading | GB/s | folder, s "
    "| confirmed | version | digest |"
)
RUN_HEAD = (
    "| run | trainers | engines | samples | updates | s an update | medians by stage, s "
    "| trainer idle | engines idle | GPUs idle | planner |"
)
KILL_HEAD = "| killed | after updates | s to the next update | s to its replacement |"
EFFICIENCY, ENGINES, PUBLICATION, LOSS = 0.85, 0.9, 1.3, 1e-3

Results = Mapping[str, dict[str, Any]]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table of goals."""

    name: str
    wanted: str
    value: str
    holds: bool | None
    """None: not judged here."""

    def line(self) -> str:
        """As a row of the table."""
        verdict = "not judged" if self.holds is None else "yes" if self.holds else "**no**"
        return f"| {self.name} | {self.wanted} | {self.value} | {verdict} |"


def main() -> None:
    """Print all tables; the exit code is the verdict."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: scaling_goals.py FOLDER")
    results = read(Path(sys.argv[1]))
    judged = list(goals(results))
    print("\n".join([*markdown(results), "", *goal_table(judged)]))
    if any(goal.holds is False for goal in judged):
        raise SystemExit(1)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of the parts that left some."""
    files = {part: folder / f"{part}.json" for part in PARTS}
    return {part: json.loads(file.read_text()) for part, file in files.items() if file.exists()}


def goals(results: Results) -> Iterator[Goal]:
    """Every goal with what was measured."""
    cpu = any(result.get("cpu") for result in results.values())
    yield from _trainer_goals(_rows(results, "trainer"), judged=not cpu)
    yield _engine_goal(_rows(results, "engines"), judged=not cpu)
    whole = "async" in results
    yield from _publication_goals(publications(results), whole=whole, judged=not cpu)
    yield from _kill_goals(results.get("kill"))


def publications(results: Results) -> list[Row]:
    """Rows by number of engines; the async run has the largest."""
    last: list[Row] = results.get("async", {}).get("publication", [])
    return sorted([*_rows(results, "publication"), *last], key=lambda row: row["engines"])


def _rows(results: Results, part: str) -> list[Row]:
    rows: list[Row] = results.get(part, {}).get("rows", [])
    return [row for row in rows if "error" not in row]


def _missing(name: str, wanted: str) -> Goal:
    return Goal(name, wanted, "not measured", holds=False)


def _trainer_goals(rows: Sequence[Row], *, judged: bool) -> Iterator[Goal]:
    most = max((row["world"] for row in rows if "efficiency" in row), default=1)
    name, wanted = "trainer efficiency from 1 rank to most", f">= {EFFICIENCY}"
    same = "loss of N ranks against one rank's, 10 updates", f"<= {LOSS:g}"
    if most == 1:
        yield _missing(name, wanted)
        yield _missing(*same)
        return
    value = next(row["efficiency"] for row in rows if row["world"] == most)
    yield Goal(name, wanted, f"{value:.3f} at {most}", value >= EFFICIENCY if judged else None)
    gap = max(row["loss_gap"] for row in rows if "loss_gap" in row)
    yield Goal(*same, f"{gap:.1e}", gap <= LOSS)


def _engine_goal(rows: Sequence[Row], *, judged: bool) -> Goal:
    name, wanted = "all engines over N times one engine", f">= {ENGINES}"
    several = [row for row in rows if row["engines"] > 1]
    if not several:
        return _missing(name, wanted)
    value = several[-1]["ratio"]
    told = f"{value:.3f} with {several[-1]['engines']}"
    return Goal(name, wanted, told, value >= ENGINES if judged else None)


def _publication_goals(rows: Sequence[Row], *, whole: bool, judged: bool) -> Iterator[Goal]:
    name, wanted = "publication to most engines over that to one", f"<= {PUBLICATION}"
    proof = "version and digest of every engine in every publication", "the trainer's"
    if not rows:
        yield _missing(name, wanted)
        yield _missing(*proof)
        return
    first, last = rows[0], rows[-1]
    if first["engines"] != 1 or not whole:
        yield _missing(name, wanted)
    elif last["engines"] == 1:
        yield Goal(name, wanted, "one engine only", None)
    else:
        value = last["seconds"] / first["seconds"]
        told = f"{value:.2f} with {last['engines']}"
        yield Goal(name, wanted, told, value <= PUBLICATION if judged else None)
    holds = all(row["confirmed"] for row in rows)
    yield Goal(*proof, "the same" if holds else "another", holds)


def _kill_goals(result: dict[str, Any] | None) -> Iterator[Goal]:
    recovery = "engine and trainer rank killed: next update", "comes"
    books = "audit after the kills: missing, doubled", "0, 0"
    if result is None:
        yield _missing(*recovery)
        yield _missing(*books)
        return
    told = ", ".join(f"{row['seconds_to_update']:.1f} s" for row in result["rows"])
    yield Goal(*recovery, told, len(result["rows"]) == 2)
    audit = result["audit"]
    counts = audit["missing"], audit["doubled"]
    yield Goal(*books, f"{counts[0]}, {counts[1]}", counts == (0, 0))


def goal_table(judged: Sequence[Goal]) -> list[str]:
    """The table of goals."""
    return ["| goal | wanted | measured | holds |", "|---|---|---|---|"] + [
        goal.line() for goal in judged
    ]


def markdown(results: Results) -> Iterator[str]:
    """A heading with machine and versions, then the tables of the parts."""
    for part, result in results.items():
        machine = {key: value for key, value in result["machine"].items() if value is not None}
        told = ", ".join(f"{key} {_short(value)}" for key, value in machine.items())
        yield f"{part}{' (CPU)' if result.get('cpu') else ''}: {told}"
    yield ""
    yield from _table(
        TRAINER_HEAD,
        map(_trainer_cells, results.get("trainer", {}).get("rows", [])),
    )
    yield from _table(
        ENGINE_HEAD,
        map(_engine_cells, _rows(results, "engines")),
    )
    yield from _table(
        PUBLICATION_HEAD,
        map(_publication_cells, publications(results)),
    )
    runs = [*_rows(results, "async"), *_rows(results, "colocated")]
    yield from _table(
        RUN_HEAD,
        map(_run_cells, runs),
    )
    if len(runs) == 2:
        first = min(runs, key=lambda row: row["seconds_per_update"])
        yield (
            f"Faster: {first['kind']}. `perdure plan` takes either and prefers none: "
            "`placement.mode` and `async.fully_async` of the run file decide."
        )
        yield ""
    kill = results.get("kill", {"rows": []})
    yield from _table(
        KILL_HEAD,
        map(_kill_cells, kill["rows"]),
    )
    if "audit" in kill:
        yield f"Audit: {kill['audit']['verdict']}; {kill['audit']['updates_redone']} redone."


def _table(head: str, rows: Iterable[list[str]]) -> Iterator[str]:
    filled = list(rows)
    if filled:
        yield head
        yield "|---" * (head.count("|") - 1) + "|"
        yield from (f"| {' | '.join(cells)} |" for cells in filled)
        yield ""


def _trainer_cells(row: Row) -> list[str]:
    if "error" in row:
        return [str(row["world"]), "failed: " + row["error"].splitlines()[-1].replace("|", "/")]
    return [
        str(row["world"]),
        "yes" if row["compiled"] else "no",
        f"{row['tokens']:,}",
        f"{row['seconds']:.3f}",
        f"{row['tokens_per_s']:,.0f}",
        _number(row["mfu"], ".3f"),
        _number(row.get("efficiency"), ".3f"),
        _number(row["peak_gib"] or None, ".1f"),
        _number(row.get("loss_gap"), ".1e"),
        _number(row.get("loss_moved"), ".1e"),
        _number(row.get("norm_gap"), ".1e"),
    ]


def _engine_cells(row: Row) -> list[str]:
    return [
        str(row["engines"]),
        str(row["tensor_parallel"]),
        str(row["concurrency"]),
        f"{row['tokens_per_s']:,.0f}",
        f"{row['ratio']:.3f}",
        ", ".join(f"{share:.3f}" for share in row["shares"]),
    ]


def _publication_cells(row: Row) -> list[str]:
    last = row["last"]
    return [
        str(row["engines"]),
        str(row["trainers"]),
        row["transport"],
        f"{row['bytes'] / 1e6:,.1f}",
        f"{row['seconds']:.3f} ({row['first_seconds']:.3f})",
        f"{row['load_seconds']:.3f}",
        f"{row['bytes_per_s'] / 1e9:.2f}",
        f"{row['folder_seconds']:.3f}",
        "all" if row["confirmed"] else "**not all**",
        ", ".join(sorted({str(each["version"]) for each in last})),
        ", ".join(sorted({each["digest"][:12] for each in last})),
    ]


def _run_cells(row: Row) -> list[str]:
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["stages"].items())
    idle = [row["engine_idle"]] if row["engine_idle"] is not None else []
    engines = idle or list((row["engines_empty"] or {}).values())
    return [
        row["kind"],
        str(row["trainers"]),
        str(row["engines"]),
        str(row["samples"]),
        str(row["updates"]),
        f"{row['seconds_per_update']:.3f}",
        stages,
        f"{row['trainer_idle']:.2f}",
        _shares(engines),
        _shares((row["gpu_idle"] or {}).values()),
        _planned(row["plan"]),
    ]


def _planned(plan: Mapping[str, Any]) -> str:
    """Where ``perdure plan`` puts the run, and what a GPU holds while it trains."""
    if plan["gpus"] is None:
        return "no GPUs"
    memory = plan["gpu_memory"]
    held = f", {memory['training_bytes'] / 2**30:.0f} GiB training" if memory else ""
    return f"{plan['gpus']}{held}"


def _kill_cells(row: Row) -> list[str]:
    replaced = _number(row["seconds_to_replacement"], ".1f")
    return [
        row["killed"],
        str(row["updates_before"]),
        f"{row['seconds_to_update']:.1f}",
        replaced,
    ]


def _shares(values: Any) -> str:
    return ", ".join(f"{value:.2f}" for value in values) or "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(f"{each:.1f}" for each in value)
    return str(value)


if __name__ == "__main__":
    main()
