"""What becomes of the groups that a free-running producer finishes, between two collections."""

from collections import Counter
from dataclasses import dataclass, field

import structlog

from activities.rollout.filters import VERIFIER_ERROR, drop_reason
from activities.rollout.summary import SampledTally
from activities.rollout.training_groups import FILTER_FACTOR
from activities.rollout.unscored import ERROR_FACTOR, complaint, refuse_broken_verifier
from models.prompt import PromptDraw
from models.rollout import DroppedGroup
from models.sample import SampleGroup

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Window:
    """What was finished since the last collection."""

    tally: SampledTally = field(default_factory=SampledTally)
    """Faults, and the filtered groups; a kept one counts with the collection that it goes into."""
    dropped: dict[int, DroppedGroup] = field(default_factory=dict)
    """Group index -> what the next collection's manifest will name."""
    kept: int = 0
    filtered: int = 0
    unscored: int = 0


class Selection:
    """Keeps or drops finished groups; a dropped one is owed until a manifest names it."""

    def __init__(self, batch_size: int, filter_zero_std: bool) -> None:
        self._batch_size = batch_size
        self._filter_zero_std = filter_zero_std
        self._window = Window()

    @property
    def num_dropped(self) -> int:
        """Groups that the next collection's manifest will name as dropped."""
        return len(self._window.dropped)

    def keeps(self, draw: PromptDraw, group: SampleGroup) -> bool:
        """Count a finished group and say whether it may train.

        With more than ``FILTER_FACTOR`` filtered groups for each kept one (of at least a batch)
        ties are kept as well: a policy that always ties would otherwise sample for ever.

        Raises:
            ContractViolation: most groups cannot be scored.
        """
        window = self._window
        # Kept groups widen the limits: a queue that takes several batches is no starving trainer.
        scale = max(self._batch_size, window.kept)
        filters = self._filter_zero_std and window.filtered < FILTER_FACTOR * scale
        reason = drop_reason(group.rewards, filters)
        if reason is None:
            window.kept += 1
            return True
        window.tally.add(group, None)
        self.drop(draw, reason)
        if reason != VERIFIER_ERROR:
            window.filtered += 1
            return False
        window.unscored += 1
        _log.warning("group_not_scored", group=group.group_index, error=complaint(group))
        refuse_broken_verifier(window.unscored, ERROR_FACTOR * scale, group)
        return False

    def drop(self, draw: PromptDraw, reason: str) -> None:
        """Note that the group must not train; its prompt is not sampled again."""
        self._window.dropped[draw.group_index] = DroppedGroup(draw=draw, reason=reason)

    def has_dropped(self, draw: PromptDraw) -> bool:
        """Whether ``draw`` was dropped since the last collection."""
        return draw.group_index in self._window.dropped

    def add_fault(self, category: str) -> None:
        """Count a failed group attempt."""
        self._window.tally.add_fault(category)

    def take(self) -> Window:
        """The window, for a collection; a new one begins."""
        taken, self._window = self._window, Window()
        taken.tally.dropped = dict(Counter(each.reason for each in taken.dropped.values()))
        return taken

    def give_back(self, taken: Window) -> None:
        """Take ``taken`` back: its collection was not committed."""
        window = self._window
        window.tally.merge(taken.tally)
        window.dropped = taken.dropped | window.dropped
        window.kept += taken.kept
        window.filtered += taken.filtered
        window.unscored += taken.unscored
