"""Rows of a trainer of several processes: one a rank, each with what ended the life before it.

``fleet.json`` knows the trainer's own process, rank 0; it wrote down the beginnings of the others
and which of them ended first. Ranks compute in step, so one end is the end of all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from activities.storage import layout
from models.errors import TrainerLost
from models.ports import RankEvent
from workers.cli import artifacts
from workers.cli.display import age
from workers.cli.overview import seen_alive

_EVENTS: TypeAdapter[tuple[RankEvent, ...]] = TypeAdapter(tuple[RankEvent, ...])

Row = dict[str, Any]


def rank_rows(root: str, trainer: Row, *, is_local: bool) -> list[Row]:
    """The row of ``trainer`` (rank 0) and one of every other rank; only it, when there are none.

    ``is_local``: all processes are on this host.
    """
    events = _events(root)
    begun = {event.rank: event for event in events if not event.ended}
    ends = {event.incarnation: event for event in reversed(events) if event.ended}
    first = trainer | _failure(0, trainer["attempt"], trainer, ends)
    seen = seen_alive(trainer["pid"], trainer["host"], is_local=is_local)
    if seen is None and trainer["attempt"] in ends and trainer["state"] == "running":
        first |= {"state": "lost", "age_s": None}
    return [first, *(_row(begun[rank], trainer, ends, is_local) for rank in sorted(begun))]


def _row(event: RankEvent, trainer: Row, ends: Mapping[int, RankEvent], is_local: bool) -> Row:
    """The newest life of one rank; a ``trainer`` of a later life has not started it yet."""
    alive = event.pid is not None and seen_alive(event.pid, event.host, is_local=is_local)
    if alive is None:
        of_this_life = event.incarnation == trainer["attempt"]
        alive = of_this_life and trainer["state"] == "running" and event.incarnation not in ends
    dead = "ended" if trainer["state"] == "ended" else "lost"
    return {
        **trainer,
        "rank": event.rank,
        "state": "running" if alive else dead,
        "attempt": event.incarnation,
        "host": event.host,
        "pid": event.pid,
        "age_s": age(event.time_unix) if alive else None,
        **_failure(event.rank, event.incarnation, trainer, ends),
    }


def _failure(rank: int, life: int, trainer: Row, ends: Mapping[int, RankEvent]) -> Row:
    """What ended this life if a rank did, else the one before: as written down, else as known."""
    end = ends.get(life) or ends.get(life - 1)
    if end is not None:
        reason = end.ended if end.rank == rank else f"ended because {end.ended}"
        return {"last_failure": TrainerLost.__name__, "reason": reason}
    if life != trainer["attempt"]:
        return {"last_failure": None, "reason": None}
    known = {"last_failure": trainer["last_failure"], "reason": trainer["reason"]}
    if rank and known["last_failure"]:
        known["reason"] = f"ended with the trainer: {known['reason']}"
    return known


def _events(root: str) -> Sequence[RankEvent]:
    try:
        return _EVENTS.validate_python(artifacts.rows_of(root, layout.TRAINER_RANKS))
    except ValidationError:
        return ()
