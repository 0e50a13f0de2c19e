"""Schedules of retraining on a terminal, with what their roots say."""

from typing import Any

from rich.console import Console
from rich.table import Table

from activities.retraining.lineage import read_lineage, read_pointer
from activities.storage.store import Store
from models.errors import PerdureError
from models.retraining import RetrainingRequest
from workers.cli.output import notice
from workers.cli.schedules import ScheduleView

_SHOWN = 5
"""Newest decisions that are shown."""


def read_root(request: RetrainingRequest | None) -> dict[str, Any]:
    """Root, pointer and decisions of the retraining as plain JSON; what is out of reach is None."""
    found: dict[str, Any] = {"root": None, "latest": None, "decisions": None}
    root = ((request.config if request else {}).get("output") or {}).get("root")
    if not root:
        return found
    found["root"] = root
    try:
        store = Store(root)
        pointer, records = read_pointer(store), read_lineage(store)
    except (PerdureError, OSError) as error:
        notice(f"perdure: warning: {error}")
        return found
    found["latest"] = pointer.model_dump(mode="json") if pointer else None
    found["decisions"] = [
        {
            "number": record.number,
            "firing": record.firing,
            "decision": record.decision.value,
            "reason": record.reason,
        }
        for record in records
    ]
    return found


def show_list(console: Console, views: list[ScheduleView]) -> None:
    """A row for each schedule."""
    table = Table("schedule", "state", "next firing", "last firing", "note", box=None)
    for view in views:
        state = "paused" if view.paused else "active"
        following = view.next_times[0] if view.next_times else "none"
        last = view.recent[-1] if view.recent else "none"
        table.add_row(view.schedule_id, state, following, last, view.note)
    console.print(table)


def show(console: Console, view: ScheduleView, files: dict[str, Any]) -> None:
    """Everything about one schedule."""
    latest = files["latest"]
    lines = [
        f"{view.schedule_id}: {'paused' if view.paused else 'active'}"
        + (f" ({view.note})" if view.note else ""),
        f"  next: {', '.join(view.next_times[:3]) or 'none'}",
        f"  fired {view.num_firings}, skipped {view.num_skipped} (overlap {view.overlap}), "
        f"missed {view.num_missed}",
        f"  running: {', '.join(view.running) or 'none'}",
        f"  root: {files['root'] or 'unknown'}",
        f"  latest: {latest['export'] if latest else 'none promoted yet'}",
    ]
    lines += [
        f"  {record['number']}. {record['firing']}: {record['decision']}: {record['reason']}"
        for record in (files["decisions"] or [])[-_SHOWN:]
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
