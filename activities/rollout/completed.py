"""The queue of finished groups between the free-running producer and the trainer."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from models.prompt import PromptDraw
from models.sample import SampleGroup


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A scored group that passed the filter, with the draw that it answers."""

    draw: PromptDraw
    group: SampleGroup


class CompletedQueue:
    """First in, first out, in order of completion; belongs to one event loop.

    ``capacity`` (groups, at least 1) only refuses ``put``: what was taken for a collection that did
    not come about returns whatever room there is.
    """

    def __init__(self, capacity: int) -> None:
        self._groups: deque[FinishedGroup] = deque()
        self._regular = max(1, capacity)
        self.capacity = self._regular

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[FinishedGroup]:
        return iter(self._groups)

    @property
    def is_full(self) -> bool:
        """Whether ``put`` is refused."""
        return len(self._groups) >= self.capacity

    @property
    def is_overfull(self) -> bool:
        """Whether it holds more than its capacity, after a give-back or a restored capacity."""
        return len(self._groups) > self.capacity

    def put(self, finished: FinishedGroup) -> bool:
        """Append a group; False when there is no room."""
        if self.is_full:
            return False
        self._groups.append(finished)
        return True

    def take(self) -> FinishedGroup | None:
        """The oldest group, if any."""
        return self._groups.popleft() if self._groups else None

    def give_back(self, finished: Sequence[FinishedGroup]) -> None:
        """Put groups back to the front, in the given order."""
        self._groups.extendleft(reversed(finished))

    def widen(self, groups: int) -> None:
        """Take ``groups`` more than there are or fit now, until ``restore``."""
        self.capacity = max(self.capacity, len(self._groups)) + groups

    def restore(self) -> None:
        """Return to the regular capacity; groups above it stay."""
        self.capacity = self._regular

    def clear(self) -> None:
        """Drop every group."""
        self._groups.clear()
