"""Prompt accounting of a run from its artifacts alone: complete, stopped, killed or running.

Every prompt is drawn under a group index, counted from 0 without gaps, so a cursor that stands at
``sample_group_index`` says exactly what was drawn. Each of those must be trained in the final line
(see ``line``), dropped by one of its collections, or still owed::

    drawn = trained + dropped + pending + missing

Which cursor is asked
    Of those of the final line the one that counts most collections as consumed, and of equals the
    one that had drawn more. An older one would excuse a prompt that it calls pending and that was
    lost since. In detail:

    complete or stopped
        The last checkpoint's: taken after the last collection, when nothing was in flight.
    running, killed or failed
        ``data_after`` of the newest committed collection that no rebuild undid, trained or not.
        Groups of a collection that is not trained yet are pending: a resumed run trains that
        collection or samples the same prompts again.
    rewound (the trainer was lost)
        The same two, but never one of the undone line: its draws were taken back, and the same
        indices are handed out again. Until the rebuilt run commits its first collection no file
        tells that it was rewound; the books are then those of the moment before.
    damaged
        The newest one that can be read. Later collections can only add to it: their groups count
        as drawn, and a prompt that it calls pending may be trained later.

missing: drawn, and neither trained, dropped nor pending. doubled: trained once more than once, a
group or a prompt of one pass over the data, or owed again by a ledger that should have forgotten
it. A collection whose file is gone proves nothing: its groups are missing, and a note says why.
"""

import contextlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum

from activities.analysis.evidence import Evidence, Position, read_evidence
from activities.analysis.line import FinalLine, LineUpdate, final_line
from activities.rollout.collection_file import GroupIdentity, read_identities
from activities.storage import layout
from activities.storage.store import Store
from models.errors import PerdureError
from models.prompt import DataState, PromptDraw
from models.rollout import CollectionManifest

NOT_RECORDED = "reason not recorded"
"""Drop reason of a group that its manifest counts and does not name."""


class Fate(StrEnum):
    """Where a prompt ended."""

    TRAINED = "trained"
    DROPPED = "dropped"
    PENDING = "pending"
    MISSING = "missing"


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
    trained: list[tuple[int, int | None]] = field(default_factory=list)
    """(update, policy version after it) for each time it was trained in the final line."""
    abandoned: list[tuple[int, int]] = field(default_factory=list)
    """(update, epoch) of collections that held it and that a rebuild undid."""
    requeues: int = 0
    doubled: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether it was lost or trained more than once."""
        return self.doubled or self.fate is Fate.MISSING


@dataclass(frozen=True, slots=True)
class Audit:
    """The books of a run."""

    run_id: str
    updates: int
    """Length of the final line."""
    updates_doubled: int
    updates_redone: int
    """Finished updates that a rebuild undid and that were done again: no error."""
    updates_unrecorded: int
    """Updates of the final line that have no row; their collection is inferred."""
    updates_unreadable: int
    """Updates of the final line whose collection is gone or damaged: what they trained is open."""
    prompts_doubled: int
    prompts_dropped: dict[str, int]
    """Reason -> prompts."""
    cursor: str
    """Which file says what was drawn."""
    lives: tuple[PromptLife, ...]
    """Every prompt drawn, by group index."""
    trained: tuple[GroupIdentity, ...]
    """In the order of training."""
    notes: tuple[str, ...]

    def count(self, fate: Fate) -> int:
        """Prompts that ended there."""
        return sum(life.fate is fate for life in self.lives)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is missing, nothing was done twice, and nothing hides what was done."""
        return not self._faults()

    @property
    def verdict(self) -> str:
        """One line."""
        if faults := self._faults():
            return f"not accounted for: {', '.join(faults)}"
        if not self.lives:
            return "accounted for: no prompt was drawn yet"
        return (
            f"accounted for: {len(self.lives)} prompts drawn, none missing, none doubled; "
            f"{self.updates} updates, each applied once"
        )

    def _faults(self) -> list[str]:
        faults = (
            (self.count(Fate.MISSING), "prompts missing"),
            (self.prompts_doubled, "prompts doubled"),
            (self.updates_doubled, "updates doubled"),
            (self.updates_unreadable, "updates whose collection cannot be read"),
        )
        return [f"{number} {what}" for number, what in faults if number]


def audit(root: str) -> Audit:
    """Audit the run under ``root`` (a folder or a URL).

    Raises:
        ConfigurationError: ``root`` holds no run.
    """
    store = Store(root)
    evidence = read_evidence(store)
    line = final_line(evidence)
    books = _Books(store, evidence, line)
    books.add_line()
    books.add_ahead()
    position = _newest_position(line)
    books.settle(position)
    books.add_history()
    notes = [*evidence.notes, *_notes_on(line)]
    return Audit(
        run_id=evidence.run_id,
        updates=len(line.updates),
        updates_doubled=len(line.doubled),
        updates_redone=line.redone,
        updates_unrecorded=sum(not each.recorded for each in line.updates),
        updates_unreadable=books.unreadable,
        prompts_doubled=books.doubled,
        prompts_dropped=dict(sorted(books.dropped.items())),
        cursor=position.source,
        lives=tuple(life for _, life in sorted(books.lives.items())),
        trained=tuple(books.trained),
        notes=tuple(notes),
    )


def _newest_position(line: FinalLine) -> Position:
    """See the module: most consumed, then most drawn."""
    trained = [each.manifest for each in line.updates if each.manifest is not None]
    positions = [] if line.checkpoint is None else [line.checkpoint]
    positions += [_after(manifest) for manifest in (*trained, *line.ahead)]
    start = Position(-1, 0, DataState(), "none: nothing is committed")
    return max(positions, key=lambda each: (each.consumed, _drawn(each)), default=start)


def _after(manifest: CollectionManifest) -> Position:
    place = manifest.collection.update, manifest.collection.epoch
    source = layout.collection_manifest(*place)
    return Position(*place, manifest.data_after, source)


def _drawn(position: Position) -> int:
    return position.state.sample_group_index


def _notes_on(line: FinalLine) -> list[str]:
    notes = []
    unrecorded = [each.update for each in line.updates if not each.recorded]
    if unrecorded:
        notes.append(
            f"{layout.UPDATES} has no row of updates {_some(unrecorded)}: later work proves that "
            "they were applied, their collections are inferred"
        )
    if line.doubled:
        notes.append(f"applied twice: updates {_some(list(line.doubled))}")
    if line.undone:
        notes.append(f"{line.undone} finished updates were undone by a rebuild, to be done again")
    saved = -1 if line.checkpoint is None else line.checkpoint.consumed
    last = len(line.updates) - 1
    if last > saved:
        notes.append(f"updates {saved + 1} to {last} are in no checkpoint yet")
    return notes


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown


class _Books:
    """The lives of prompts while artifact after artifact is entered."""

    def __init__(self, store: Store, evidence: Evidence, line: FinalLine) -> None:
        self.lives: dict[int, PromptLife] = {}
        self.trained: list[GroupIdentity] = []
        self.dropped: Counter[str] = Counter()
        self.doubled = 0
        self.unreadable = 0
        self._store = store
        self._evidence = evidence
        self._line = line
        self._unnamed: Counter[str] = Counter()  # drop reason -> groups that are only counted

    def add_line(self) -> None:
        """Enter the trained groups, and the dropped ones of their collections."""
        for each in self._line.updates:
            groups = self._groups_of(each)
            self.unreadable += not groups
            for identity in groups:
                self.trained.append(identity)
                life = self._life(identity)
                life.trained.append((each.update, each.policy_version))
                life.fate, life.reason = Fate.TRAINED, ""
            if each.manifest is not None:
                self._add_dropped(each.manifest)

    def add_ahead(self) -> None:
        """Enter collections that wait for their update."""
        for manifest in self._line.ahead:
            for identity in self._read(manifest):
                life = self._life(identity)
                if life.fate is not Fate.TRAINED:
                    life.fate = Fate.PENDING
                    life.reason = f"collected for update {manifest.collection.update}"
            self._add_dropped(manifest)

    def settle(self, position: Position) -> None:
        """Enter the ledger, and find what is drawn without a fate."""
        pending_again = 0
        for draw in position.state.pending:
            life = self._life(_identity(draw))
            life.requeues = draw.requeues
            if life.fate is Fate.MISSING:
                life.fate, life.reason = Fate.PENDING, "waits in the ledger"
            elif any(update <= position.consumed for update, _ in life.trained):
                life.doubled = True
                pending_again += 1
        drawn = max(_drawn(position), max(self.lives, default=-1) + 1)
        for index in range(drawn):
            self.lives.setdefault(index, PromptLife(index))
        self.doubled = self._trained_again() + pending_again
        self.dropped.update(
            life.reason for life in self.lives.values() if life.fate is Fate.DROPPED
        )
        self._place_unnamed_drops()

    def add_history(self) -> None:
        """Enter what undone collections held, and name who is missing if any file still can."""
        for manifest in self._line.abandoned:
            collection = manifest.collection
            with contextlib.suppress(OSError, ValueError, KeyError, PerdureError):
                for identity in read_identities(self._store, collection.uri, collection.sha256):
                    if identity.group_index in self.lives:
                        undone = (collection.update, collection.epoch)
                        self._life(identity).abandoned.append(undone)
        for manifest in self._evidence.manifests.values():
            for draw in manifest.data_after.pending:
                if draw.group_index in self.lives:
                    self._life(_identity(draw))

    def _trained_again(self) -> int:
        """Trainings beyond the first: of a group, and of a prompt in one pass over the data."""
        trainings: Counter[int] = Counter(each.group_index for each in self.trained)
        groups: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        for each in self.trained:
            groups[each.prepared_sample_id, each.epoch_id].add(each.group_index)
        again = {index: count for index, count in trainings.items() if count > 1}
        same = [indices for indices in groups.values() if len(indices) > 1]
        for index in {*again, *(index for indices in same for index in indices)}:
            self.lives[index].doubled = True
        return sum(again.values()) - len(again) + sum(len(indices) - 1 for indices in same)

    def _place_unnamed_drops(self) -> None:
        """Old manifests count dropped groups and do not name them: these explain who is missing."""
        lost = [life for life in self.lives.values() if life.fate is Fate.MISSING]
        reasons = list(self._unnamed.elements())
        alone = next(iter(self._unnamed)) if len(self._unnamed) == 1 else NOT_RECORDED
        for life, reason in zip(lost, reasons, strict=False):
            life.fate, life.reason = Fate.DROPPED, alone
            self.dropped[reason] += 1
        if reasons and len(lost) > len(reasons):
            self._evidence.notes.append(
                f"{len(reasons)} dropped groups are counted, not named: of {len(lost)} groups "
                "nobody can tell which were dropped and which are missing"
            )

    def _add_dropped(self, manifest: CollectionManifest) -> None:
        named: Counter[str] = Counter()
        for each in manifest.dropped:
            named[each.reason] += 1
            life = self._life(_identity(each.draw))
            life.requeues = each.draw.requeues
            if life.fate is Fate.MISSING:
                life.fate, life.reason = Fate.DROPPED, each.reason
        self._unnamed += Counter(manifest.collection.counts.filtered_groups) - named

    def _groups_of(self, update: LineUpdate) -> list[GroupIdentity]:
        """The groups that an update trained; by its digest alone when the manifest is gone."""
        if update.manifest is not None:
            return self._read(update.manifest)
        if update.sha256 is None or update.epoch is None:
            self._evidence.notes.append(f"no collection of update {update.update} is left")
            return []
        uri = layout.collection_parquet(update.update, update.epoch)
        self._evidence.notes.append(
            f"no manifest of update {update.update} has the trained digest {update.sha256}"
        )
        return self._read_file(uri, update.sha256)

    def _read(self, manifest: CollectionManifest) -> list[GroupIdentity]:
        return self._read_file(manifest.collection.uri, manifest.collection.sha256)

    def _read_file(self, uri: str, sha256: str) -> list[GroupIdentity]:
        read = self._evidence.try_read(uri, lambda: read_identities(self._store, uri, sha256))
        return read or []

    def _life(self, identity: GroupIdentity) -> PromptLife:
        life = self.lives.setdefault(identity.group_index, PromptLife(identity.group_index))
        if life.prepared_sample_id is None:
            life.prepared_sample_id = identity.prepared_sample_id
            life.epoch_id = identity.epoch_id
        return life


def _identity(draw: PromptDraw) -> GroupIdentity:
    return GroupIdentity(draw.group_index, draw.prepared_sample_id, draw.epoch_id)
