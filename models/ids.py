"""Identities: runs and fence tokens."""

from functools import total_ordering

from models.base import Frozen


@total_ordering
class FenceToken(Frozen):
    """Who may mutate: compared as the tuple (epoch, update, attempt), larger wins.

    ``epoch`` is taken by compare-and-swap on the output root and grows with every rebuild;
    ``update`` is the index of the update being worked on; ``attempt`` is Temporal's activity
    attempt. The whole triple is needed: the attempt counter restarts at 1 for the next activity.
    """

    epoch: int
    update: int
    attempt: int

    def as_tuple(self) -> tuple[int, int, int]:
        """Return (epoch, update, attempt)."""
        return (self.epoch, self.update, self.attempt)

    def __lt__(self, other: "FenceToken") -> bool:
        return self.as_tuple() < other.as_tuple()

    def __str__(self) -> str:
        return f"(epoch {self.epoch}, update {self.update}, attempt {self.attempt})"


class RunRef(Frozen):
    """Where a run lives. Workers load the resolved configuration from ``root`` by its digest."""

    run_id: str
    """The Temporal workflow id, also the Ray namespace."""
    root: str
    """Output root: an fsspec URL or an absolute path."""
    spec_sha256: str
