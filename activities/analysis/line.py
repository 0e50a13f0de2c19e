"""The final line of a run: which updates are in its newest trainer state, whatever was redone.

Every rebuild takes a new epoch, and the first collection of an epoch is for the update that its
trainer does next. So an epoch *starts* at the smallest update of its rows and manifests, and all
that older epochs did at that update or later was undone: (update u, epoch e) *stands* unless a
higher epoch starts at or before u. That rule needs no order of lines, so a row that a slow worker
appends late changes nothing. A rewind has an epoch of its own that starts where it went back to.

The line has at least as many updates as the newest epoch's start, the last standing row and the
newest standing checkpoint prove. An update among them without a row was trained by a trainer whose
report was lost with its worker; its collection is the one that stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from activities.analysis.evidence import Evidence, Position, UpdateRow
from models.rollout import CollectionManifest

Collected = tuple[int, CollectionManifest]
"""(epoch, manifest)."""


@dataclass(frozen=True, slots=True)
class LineUpdate:
    """One update of the final line."""

    update: int
    epoch: int | None
    """Under which it was trained, or collected when no row says; none when nothing does."""
    sha256: str | None
    """Digest of the trained Parquet file."""
    policy_version: int | None
    """After the update; none when it has no row."""
    manifest: CollectionManifest | None
    recorded: bool
    """Whether ``updates.jsonl`` has it."""


@dataclass(frozen=True, slots=True)
class FinalLine:
    """See the module."""

    updates: tuple[LineUpdate, ...]
    ahead: tuple[CollectionManifest, ...]
    """Collections of the next updates: committed, not trained yet."""
    abandoned: tuple[CollectionManifest, ...]
    """Collections of epochs that a rebuild undid."""
    redone: int
    """Finished updates that were undone and finished again."""
    undone: int
    """Finished updates that were undone and are not finished again yet."""
    doubled: tuple[int, ...]
    """Updates that were applied twice to the same trainer state."""
    lost: tuple[int, ...]
    """Updates after which the trainer had fewer steps than before, without a rebuild."""
    checkpoint: Position | None
    """The newest checkpoint, if it stands."""


class _Epochs:
    """Where each epoch starts, and what therefore stands."""

    def __init__(self, evidence: Evidence) -> None:
        self.starts: dict[int, int] = {}
        places = [(row.update, row.epoch) for row in evidence.rows]
        places += [(rewind.updates, rewind.epoch) for rewind in evidence.rewinds]
        for update, epoch in (*places, *evidence.manifests):
            self.starts[epoch] = min(update, self.starts.get(epoch, update))

    def stands(self, update: int, epoch: int) -> bool:
        """Whether no higher epoch starts at or before ``update``."""
        return not any(e > epoch and start <= update for e, start in self.starts.items())

    @property
    def newest_start(self) -> int:
        """Updates that the trainer of the newest epoch had when that began; 0 without epochs."""
        return self.starts[max(self.starts)] if self.starts else 0


def final_line(evidence: Evidence) -> FinalLine:
    """Follow the evidence to the updates that count."""
    epochs = _Epochs(evidence)
    rows: dict[int, list[UpdateRow]] = {}
    undone: set[tuple[int, int]] = set()
    for row in evidence.rows:
        if epochs.stands(row.update, row.epoch):
            rows.setdefault(row.update, []).append(row)
        else:
            undone.add((row.update, row.epoch))
    standing = {
        place[0]: manifest
        for place, manifest in sorted(evidence.manifests.items())
        if epochs.stands(*place)
    }
    checkpoint = evidence.checkpoint
    if checkpoint is not None and not epochs.stands(checkpoint.consumed, checkpoint.epoch):
        checkpoint = None
    length = max(
        epochs.newest_start,
        max(rows, default=-1) + 1,
        0 if checkpoint is None else checkpoint.consumed + 1,
    )
    collected: dict[int, list[Collected]] = {}
    for (update, epoch), manifest in sorted(evidence.manifests.items()):
        collected.setdefault(update, []).append((epoch, manifest))
    updates = tuple(
        _recorded(rows[update][-1], collected.get(update, ()))
        if update in rows
        else _inferred(update, standing)
        for update in range(length)
    )
    ahead: list[CollectionManifest] = []
    while (update := length + len(ahead)) in standing:
        ahead.append(standing[update])
    kept = {id(each.manifest) for each in updates} | {id(each) for each in ahead}
    return FinalLine(
        updates=updates,
        ahead=tuple(ahead),
        abandoned=tuple(each for each in evidence.manifests.values() if id(each) not in kept),
        redone=sum(update < length for update, _ in undone),
        undone=sum(update >= length for update, _ in undone),
        doubled=_doubled(rows, evidence.steps_per_update),
        lost=_lost(rows),
        checkpoint=checkpoint,
    )


def _recorded(row: UpdateRow, collected: Sequence[Collected]) -> LineUpdate:
    """The row with the manifest of its file; a kept trainer may train an older epoch's file.

    ``collected``: what was collected for the row's update, oldest epoch first.
    """
    matching = [
        manifest
        for epoch, manifest in collected
        if epoch <= row.epoch and manifest.collection.sha256 == row.batch_sha256
    ]
    manifest = matching[-1] if matching else None
    return LineUpdate(row.update, row.epoch, row.batch_sha256, row.policy_version, manifest, True)


def _inferred(update: int, standing: dict[int, CollectionManifest]) -> LineUpdate:
    manifest = standing.get(update)
    if manifest is None:
        return LineUpdate(update, None, None, None, None, False)
    collection = manifest.collection
    return LineUpdate(update, collection.epoch, collection.sha256, None, manifest, False)


def _doubled(rows: dict[int, list[UpdateRow]], steps_per_update: int | None) -> tuple[int, ...]:
    """Updates with two different rows in one epoch, or with more steps than updates can take.

    A retried activity repeats its row; that is no double. The version counts optimizer steps, at
    most ``steps_per_update`` an update, fewer when every group tied.
    """
    doubled = {
        update
        for update, same in rows.items()
        if len({(row.batch_sha256, row.policy_version) for row in same}) > 1
    }
    before, version = -1, 0
    for update in sorted(rows):
        last = rows[update][-1]
        limit = (update - before) * (steps_per_update or 0)
        if steps_per_update is not None and last.policy_version - version > limit:
            doubled.add(update)
        before, version = update, last.policy_version
    return tuple(sorted(doubled))


def _lost(rows: dict[int, list[UpdateRow]]) -> tuple[int, ...]:
    """Updates whose version is below the one before: along the final line it never falls."""
    last = {update: rows[update][-1].policy_version for update in sorted(rows)}
    return tuple(after for before, after in pairwise(last) if last[after] < last[before])
