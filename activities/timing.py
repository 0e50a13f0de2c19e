"""``driver_timing.jsonl``: one row for each stage that ended, passed or not.

Stage names are those of the operations guide. ``generation_wait`` there is the time that the loop
waited for a collection; here it is the collect activity's own time. In the sequential loop both are
the same, in the overlapped loop it contains what was hidden behind training.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from activities.storage import layout
from activities.storage.store import Store


@asynccontextmanager
async def timed(
    store: Store, stage: str, rollout_id: int | None, details: dict[str, Any] | None = None
) -> AsyncIterator[None]:
    """Append the row of the enclosed stage when it ends.

    Args:
        store: the run's root.
        stage: e.g. ``training``.
        rollout_id: the update's index; None outside of the loop.
        details: what else a reader of the timings needs.
    """
    started_unix, started = time.time(), time.monotonic()
    passed = False
    try:
        yield
        passed = True
    finally:
        row: dict[str, Any] = {
            "stage": stage,
            "rollout_id": rollout_id,
            "started_unix": started_unix,
            "seconds": time.monotonic() - started,
            "passed": passed,
        }
        if details:
            row["details"] = details
        await asyncio.to_thread(store.append_jsonl, layout.DRIVER_TIMING, row)
