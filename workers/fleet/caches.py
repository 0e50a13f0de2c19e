"""What trainer and engines of a completed run compiled, published before they end."""

import asyncio
import contextlib
from typing import Any

import structlog

from activities.storage import layout
from models.errors import PerdureError
from workers.compiler_cache.transfer import PUBLISH_S
from workers.fleet.run_fleet import RunFleet

MARGIN_S = 10.0
"""For actors to give up by themselves, and to say so."""

_log = structlog.get_logger(__name__)


async def publish_caches(fleet: RunFleet) -> None:
    """All at once, within ``PUBLISH_S`` seconds together; what became of each goes on record.

    Best effort: a process that is dead, hangs or cannot publish fails nothing. The caller holds
    ``fleet.lock``.
    """
    roles = [("trainer", 0)]
    with contextlib.suppress(PerdureError):
        spec = await fleet.spec()
        roles += [("engine", rank) for rank in range(spec.inference.num_engines)]
    found = await asyncio.gather(*(_published(fleet, role, rank) for role, rank in roles))
    rows = [row for row in found if row is not None]
    with contextlib.suppress(PerdureError, OSError):
        await asyncio.to_thread(_record, fleet, rows)


async def _published(fleet: RunFleet, role: str, rank: int) -> dict[str, Any] | None:
    """Result of one actor; None when it has no cache."""
    actor = fleet.actor(role, rank)
    try:
        row: dict[str, Any] | None = await actor.call(
            "publish_cache", timeout_s=PUBLISH_S + MARGIN_S, follow=False
        )
    except PerdureError as error:
        row = {"work": "publish", "outcome": "failed", "reason": error.message}
        _log.warning("compiler cache not published", actor=actor.name, reason=error.message)
    return None if row is None else {**row, "actor": actor.name}


def _record(fleet: RunFleet, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        fleet.store.append_jsonl(layout.COMPILER_CACHE, row)
