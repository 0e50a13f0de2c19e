"""Which engine gets the next prompt group: the one that owes the fewest calls.

Used by the pool of a producer and by the router of a fully async run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

AVOID_AFTER_FAULT_S = 2.0
"""An engine whose connection just broke is chosen last for this long: a dead one answers
fastest and is always the least active, so it would draw every group."""


@dataclass(eq=False, slots=True)
class Load:
    """What one engine owes."""

    reserved: int = 0
    """Calls of the groups that it was given and has not answered, those not sent yet included."""
    avoid_until: float = 0.0
    """On the clock of whoever balances, in seconds."""

    def avoid(self, now: float) -> None:
        """Its connection broke at ``now``."""
        self.avoid_until = now + AVOID_AFTER_FAULT_S


def least_reserved(candidates: Iterable[T], load_of: Callable[[T], Load], now: float) -> T | None:
    """The candidate with the fewest reserved calls, a broken one last; None without candidates."""

    def rank(candidate: T) -> tuple[bool, int]:
        load = load_of(candidate)
        return load.avoid_until > now, load.reserved

    return min(candidates, key=rank, default=None)
