"""The contract file: what the trainer checked and measured, one event a line.

    {"active_tokens": 400, ..., "event": "refresh_scores", "rank": 0, "schema_version": 1}

Append only, keys sorted, no NaN. A line is one ``O_APPEND`` write of some hundred bytes that nobody
waits to reach the disk, so a kill may lose the newest ones only together with the machine. A run
that repeats an update after a recovery appends its events again: the last line of a (event,
rollout_id) is the one that counts.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from activities.storage import layout
from activities.storage.store import Store
from models.errors import ContractViolation

SCHEMA_VERSION = 1


class ContractFile:
    """Appends to ``checkpoints/training_contract_rank{r}.jsonl`` under one output root."""

    def __init__(self, store: Store, rank: int = 0) -> None:
        self._store = store
        self._rank = rank

    def append(self, event: str, values: Mapping[str, Any]) -> None:
        """Append one event.

        Raises:
            ContractViolation: a number in ``values`` is not finite; nothing was written.
            StorageFull: the device is full.
        """
        wrong = sorted(_non_finite(values, ""))
        if wrong:
            raise ContractViolation(f"event {event}: not finite: {', '.join(wrong)}")
        row = {"schema_version": SCHEMA_VERSION, "rank": self._rank, "event": event, **values}
        self._store.append_jsonl(layout.training_contract(self._rank), row)


def _non_finite(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Names of the numbers that JSON cannot carry, as ``outer.inner`` or ``list.position``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _non_finite(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            inner = {str(position): item for position, item in enumerate(value)}
            yield from _non_finite(inner, f"{prefix}{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{prefix}{name}"
