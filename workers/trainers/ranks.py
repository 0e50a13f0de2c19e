"""The ranks of a trainer: what one of them must know of the others.

Every rank runs the same code on its share of an optimizer step. Sums are over ranks, so gradients
are sums as well: a rank weighs its tokens by counts of the whole step and nobody averages later.
A check that can fail on one rank alone ends with ``agree``, before the next collective: otherwise
the others would wait in it for the one that stopped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from models.errors import PerdureError


class Ranks(Protocol):
    """One rank among ``world``; every method is called by all ranks in the same order."""

    @property
    def rank(self) -> int:
        """This rank, 0-based."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """``values`` of one shape and type on every rank -> their sum, the same bits everywhere."""

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """``values`` of one shape and type on every rank -> their elementwise maximum."""

    def exchange(self, text: str) -> tuple[str, ...]:
        """The texts of all ranks, in their order."""

    def agree(self, error: PerdureError | None) -> None:
        """Return when no rank has an error; else raise on all of them, naming rank and error."""

    def has_agreed(self, error: PerdureError) -> bool:
        """Whether ``error`` is what the last ``agree`` raised: then every rank raised it."""


class SingleRank:
    """The only rank: sums are its own values."""

    rank = 0
    world = 1

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """``values`` themselves."""
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """``values`` themselves."""
        return values

    def exchange(self, text: str) -> tuple[str, ...]:
        """``text`` alone."""
        return (text,)

    def agree(self, error: PerdureError | None) -> None:
        """Raise ``error`` with the rank in front of its message."""
        if error is not None:
            raise on_rank(error, self.rank)

    def has_agreed(self, error: PerdureError) -> bool:
        """Nobody can disagree."""
        return True


def on_rank(error: PerdureError, rank: int) -> PerdureError:
    """The same error with ``rank N:`` in front of its message."""
    error.message = f"rank {rank}: {error.message}"
    error.args = (error.message, *error.args[1:])
    return error


@contextmanager
def concluded(ranks: Ranks) -> Iterator[None]:
    """Run a block with collectives; an error that every rank meets in it is raised as one.

    Such an error follows from values that all ranks share. One that only some can meet belongs
    under ``agreed``, before the next collective.
    """
    try:
        yield
    except PerdureError as error:
        if not ranks.has_agreed(error):
            ranks.agree(error)
        raise
    ranks.agree(None)


@contextmanager
def agreed(ranks: Ranks) -> Iterator[None]:
    """Run a block without collectives; what it raises on one rank is raised on all of them."""
    error: PerdureError | None = None
    try:
        yield
    except PerdureError as raised:
        error = raised
    ranks.agree(error)
