"""Prompt accounting of a run from its artifacts alone: complete, stopped, killed or running.

Every prompt is drawn under a group index, counted from 0 without gaps, so a cursor that stands at
``sample_group_index`` says exactly what was drawn. Each of those must be trained in the final line
(see ``line``), dropped by one of its collections, or still owed::

    drawn = trained + dropped + pending + missing

Groups may finish in any order: which collection consumes a prompt says nothing about when it was
drawn. A fully async producer draws far ahead, so a ledger may owe several collections' worth of
prompts, each waiting, generating or finished; which of the three no file tells.

Which cursor is asked
    Of those of the final line the one that counts most collections as consumed, and of equals the
    one that had drawn more. An older one would excuse a prompt that it calls pending and that was
    lost since. In detail:

    complete or stopped
        The last checkpoint's: taken after the last collection. What a fully async producer had in
        the making by then is pending for good.
    running, killed or failed
        ``data_after`` of the newest committed collection that no rebuild undid, trained or not.
        Groups of a collection that is not trained yet are pending: a resumed run trains that
        collection or samples the same prompts again.
    rewound (the trainer was lost)
        The same two, but never one of the undone line: its draws were taken back, and the same
        indices are handed out again. Until the rebuilt run commits its first collection no file
        tells that it was rewound; the books are then those of the moment before.
    rewound on request
        The same two of the line that is left; the record of the rewind tells from when on.
    rebuilt producer (the trainer went on)
        The producer starts from the manifest of the last trained collection and hands out again
        what the dead one had drawn since. A checkpoint of that same update may have seen more
        draws than the rebuilt run makes at first; it counts until the next collection, whose
        cursor is then the one that holds.
    damaged
        The newest one that can be read. Later collections can only add to it: their groups count
        as drawn, and a prompt that it calls pending may be trained later.

missing: drawn, and neither trained, dropped nor pending. doubled: consumed more than once, that is
kept or dropped by two collections or twice by one; drawn twice in one pass over the data; or owed
again by a ledger that should have forgotten it. Beyond that the books are wrong when two files of
the line name different prompts under one number, when a trained group has other than all of its
samples, when the policy version falls, and when the newest checkpoint, which a resume would go by,
does not owe exactly what was not consumed. A collection whose file is gone proves nothing: its
groups are missing, and a note says why.
"""

import math
from dataclasses import dataclass

from activities.analysis.books import Books
from activities.analysis.evidence import Position, read_evidence
from activities.analysis.line import FinalLine, final_line
from activities.analysis.lives import Fate, PromptLife
from activities.rollout.collection_file import GroupIdentity
from activities.storage import layout
from activities.storage.store import Store
from models.checkpoint import Rewind
from models.prompt import DataState
from models.rollout import CollectionManifest


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
    updates_lost: int
    """Updates after which the policy version fell without a rebuild: trained steps are gone."""
    prompts_doubled: int
    prompts_mixed_up: int
    """Numbers under which files of the final line name two prompts."""
    groups_incomplete: int
    """Groups that were trained with other than all of their samples."""
    prompts_wrong_in_checkpoint: int
    """Prompts that a resume from the newest checkpoint would lose or train again."""
    prompts_dropped: dict[str, int]
    """Reason -> prompts."""
    cursor: str
    """Which file says what was drawn."""
    lives: tuple[PromptLife, ...]
    """Every prompt drawn, by group index."""
    trained: tuple[GroupIdentity, ...]
    """In the order of training; within an update, of the collection's file."""
    notes: tuple[str, ...]

    def count(self, fate: Fate) -> int:
        """Prompts that ended there."""
        return sum(life.fate is fate for life in self.lives)

    @property
    def overtaken(self) -> int:
        """Trained groups after which an earlier drawn one was trained: they finished sooner."""
        earliest, count = math.inf, 0
        for identity in reversed(self.trained):
            count += identity.group_index > earliest
            earliest = min(earliest, identity.group_index)
        return count

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
            (self.prompts_mixed_up, "prompts under another one's number"),
            (self.groups_incomplete, "groups trained with samples missing"),
            (self.updates_doubled, "updates doubled"),
            (self.updates_lost, "updates after which the policy version fell"),
            (self.updates_unreadable, "updates whose collection cannot be read"),
            (
                self.prompts_wrong_in_checkpoint,
                "prompts that a resume would lose or train again",
            ),
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
    books = Books(store, evidence, line)
    books.add_line()
    books.add_ahead()
    position = _newest_position(line)
    books.settle(position)
    wrong_ahead = [] if line.checkpoint is None else books.wrong_in(line.checkpoint)
    books.add_history()
    notes = [*evidence.notes, *map(_told, evidence.rewinds), *_notes_on(line, evidence.rewinds)]
    if line.checkpoint is not None and wrong_ahead:
        notes.append(
            f"{line.checkpoint.source} does not fit what was consumed: groups {_some(wrong_ahead)}"
        )
    lives = tuple(life for _, life in sorted(books.lives.items()))
    return Audit(
        run_id=evidence.run_id,
        updates=len(line.updates),
        updates_doubled=len(line.doubled),
        updates_redone=line.redone,
        updates_unrecorded=sum(not each.recorded for each in line.updates),
        updates_unreadable=books.unreadable,
        updates_lost=len(line.lost),
        prompts_doubled=books.doubled,
        prompts_mixed_up=sum(life.mixed_up for life in lives),
        groups_incomplete=sum(life.incomplete for life in lives),
        prompts_wrong_in_checkpoint=len(wrong_ahead),
        prompts_dropped=dict(sorted(books.dropped.items())),
        cursor=position.source,
        lives=lives,
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


def _told(rewind: Rewind) -> str:
    reason = f": {rewind.reason}" if rewind.reason else ""
    return (
        f"rewound to {rewind.updates} updates under epoch {rewind.epoch}, {rewind.undone_updates} "
        f"set aside in {layout.rewound_folder(rewind.epoch)}{reason}"
    )


def _notes_on(line: FinalLine, rewinds: list[Rewind]) -> list[str]:
    notes = []
    who = "a rewind or rebuild" if rewinds else "a rebuild"
    unrecorded = [each.update for each in line.updates if not each.recorded]
    if unrecorded:
        notes.append(
            f"{layout.UPDATES} has no row of updates {_some(unrecorded)}: later work proves that "
            "they were applied, their collections are inferred"
        )
    if line.doubled:
        notes.append(f"applied twice: updates {_some(list(line.doubled))}")
    if line.lost:
        notes.append(f"policy version fell: updates {_some(list(line.lost))}")
    if line.undone:
        notes.append(f"{line.undone} finished updates were undone by {who}, to be done again")
    saved = -1 if line.checkpoint is None else line.checkpoint.consumed
    last = len(line.updates) - 1
    if last > saved:
        which = f"update {last} is" if last == saved + 1 else f"updates {saved + 1} to {last} are"
        notes.append(f"{which} in no checkpoint yet")
    return notes


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown
