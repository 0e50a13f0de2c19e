"""The life of one handed-out prompt, as far as a run's files tell it."""

from dataclasses import dataclass, field
from enum import StrEnum

from models.prompt import PromptDraw

UNSCORED = "verifier_error"
"""Drop reason of a group that was generated and that no verifier could score."""


class Fate(StrEnum):
    """Where a prompt ended."""

    TRAINED = "trained"
    DROPPED = "dropped"
    PENDING = "pending"
    MISSING = "missing"


class Reached(StrEnum):
    """How far a prompt's newest known attempt got."""

    DRAWN = "drawn"
    GENERATED = "generated"
    SCORED = "scored"
    TRAINED = "trained"


@dataclass(slots=True)
class PromptLife:
    """What the artifacts know about one hand-out of a prompt."""

    group_index: int
    prepared_sample_id: str | None = None
    """None when no artifact names it."""
    epoch_id: int | None = None
    """Pass over the training data."""
    fate: Fate = Fate.MISSING
    reason: str = ""
    """Why it was dropped, or where it is pending."""
    samples: int = 0
    """Responses of it in collections of the final line."""
    scored: int = 0
    """Those of them that have a reward."""
    trained: list[tuple[int, int | None]] = field(default_factory=list)
    """(update, policy version after it) for each time it was trained in the final line."""
    consumed: list[int] = field(default_factory=list)
    """Collections of the final line that keep or drop it, trained or not: one, when all is well."""
    abandoned: list[tuple[int, int]] = field(default_factory=list)
    """(update, epoch) of collections that held it and that a rebuild undid."""
    requeues: int = 0
    """Attempts that failed for a serving reason, as far as a ledger tells."""
    stale: int = 0
    """Times that it was finished and too old to train, as far as a ledger tells."""
    doubled: bool = False
    mixed_up: bool = False
    """Files of the final line name two prompts under this number."""
    incomplete: bool = False
    """It was trained with other than all of its samples."""

    @property
    def is_wrong(self) -> bool:
        """Whether it was lost, mixed up, trained in part, or consumed or owed more than once."""
        faults = self.doubled or self.mixed_up or self.incomplete
        return faults or self.fate is Fate.MISSING

    @property
    def reached(self) -> Reached:
        """How far it got. A ledger does not tell whether its prompts are generating or finished."""
        if self.trained:
            return Reached.TRAINED
        if self.fate is Fate.DROPPED:
            return Reached.GENERATED if self.reason == UNSCORED else Reached.SCORED
        return Reached.SCORED if self.scored else Reached.DRAWN

    def tell(self, draw: PromptDraw) -> None:
        """Take over the counts of a ledger or a drop; they only grow along the final line."""
        self.requeues = max(self.requeues, draw.requeues)
        self.stale = max(self.stale, draw.stale)
