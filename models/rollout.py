"""Rollout collections: the committed set of groups that one update consumes."""

from pydantic import Field

from models.base import Carried, Frozen
from models.ids import RunRef
from models.prompt import DataState, PromptDraw


class CollectRequest(Frozen):
    """Ask for the collection of update ``update``, sampled at ``policy_version`` or later."""

    run: RunRef
    epoch: int
    update: int
    policy_version: int
    """The version that engines serve when the collection starts."""
    consumed_through: int
    """Collections with an index at or below this one are trained; their prompts may be forgotten.
    -1 when nothing is trained yet."""


class CollectionCounts(Frozen):
    """What a collection holds and what it cost."""

    groups: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    truncated_samples: int = 0
    invalid_verdicts: int = 0
    mixed_reward_groups: int = 0
    filtered_groups: dict[str, int] = Field(default_factory=dict)
    """Drop reason -> groups, for example ``zero_std_1.0``."""
    failed_attempts: dict[str, int] = Field(default_factory=dict)
    """Fault category -> group attempts that were requeued."""


class RolloutCollection(Frozen):
    """Address, checksum and counts of a committed collection. Never tokens."""

    update: int
    epoch: int
    uri: str
    """The Parquet file, relative to the output root."""
    sha256: str
    counts: CollectionCounts
    reward_mean: float
    min_version: int
    max_version: int
    seconds: float
    """Wall seconds from the first submission to the commit; of a fully async run, from the commit
    of the collection before it."""
    metrics: dict[str, float] = Field(default_factory=dict)


class DroppedGroup(Carried):
    """A finished group that must not train; it is consumed with its collection all the same."""

    draw: PromptDraw
    reason: str
    """``zero_std_R`` or ``verifier_error``, as in ``CollectionCounts.filtered_groups``; of a fully
    async run also ``stale`` (handler "drop") and ``max_requeues`` (stale too often)."""


class CollectionManifest(Carried):
    """``rollouts/{update:07d}.e{epoch}.json``: written last, makes the Parquet file count."""

    schema_version: int = 1
    collection: RolloutCollection
    data_after: DataState
    """Cursor and ledger with this collection counted as consumed: a new producer starts here."""
    dropped: tuple[DroppedGroup, ...] = ()
    """Groups that were sampled for this collection and dropped, in hand-out order."""
