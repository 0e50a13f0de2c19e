"""Where prompts come from: a cursor over the training rows and a ledger of what is handed out.

Each draw is in the ledger from hand-out until an update consumed the collection that keeps or drops
its group, so a snapshot at any moment names every prompt that a resumed run still owes:

    rows --draw--> out --assign(u)--> in collection u --(u trained)--> forgotten
            ^       |
            |       v
         waiting <--requeue (fault, abandoned collection), same identity, at the front
"""

import random
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from models.errors import ConfigurationError, ContractViolation
from models.prompt import DataState, PreparedPrompt, PromptDraw
from models.sample import SampleGroup


@dataclass(slots=True)
class _Entry:
    """A ledger row. ``update`` is the collection that keeps or drops the finished group, if any."""

    draw: PromptDraw
    waiting: bool = False
    update: int | None = None


class PromptSource:
    """Deterministic epochs over ``prompts``; every public call is atomic under one lock.

    The order of epoch e is a permutation seeded by (seed, e), or file order without ``shuffle``.
    """

    def __init__(
        self,
        prompts: Sequence[PreparedPrompt],
        *,
        seed: int,
        shuffle: bool,
        samples_per_prompt: int,
        train_sha256: str,
        state: DataState | None = None,
    ) -> None:
        if not prompts:
            raise ConfigurationError("the prepared training file holds no prompts")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._samples_per_prompt = samples_per_prompt
        self._train_sha256 = train_sha256
        self._lock = threading.RLock()
        self._ledger: dict[int, _Entry] = {}
        self._waiting: deque[int] = deque()
        self._order_epoch = -1
        self._order: list[int] = []
        self._cursor = DataState()
        self._restore(state or DataState())

    def draw(self, count: int) -> list[PromptDraw]:
        """Hand out ``count`` prompts: requeued ones first, then the next rows of the epoch."""
        with self._lock:
            drawn = []
            for _ in range(count):
                if self._waiting:
                    entry = self._ledger[self._waiting.popleft()]
                    entry.waiting = False
                else:
                    entry = self._next_row()
                drawn.append(entry.draw)
            return drawn

    def prompt(self, draw: PromptDraw) -> PreparedPrompt:
        """The prepared row of a draw."""
        return self._prompts[draw.row]

    def requeue(
        self, group_indices: Sequence[int], *, failed: bool = True, stale: bool = False
    ) -> None:
        """Put draws back at the front, in the given order, with their identities.

        ``failed`` counts a serving failure on each, ``stale`` a finished group that was too old to
        train; with neither the draw goes back as it was (a cancelled attempt and an abandoned
        collection are nobody's fault).
        """
        with self._lock:
            for group_index in reversed(group_indices):
                entry = self._entry(group_index)
                if entry.waiting:
                    self._waiting.remove(group_index)
                draw = entry.draw
                if failed or stale:
                    counts = {"requeues": draw.requeues + failed, "stale": draw.stale + stale}
                    entry.draw = draw.model_copy(update=counts)
                entry.waiting, entry.update = True, None
                self._waiting.appendleft(group_index)

    def assign(self, update: int, group_indices: Iterable[int]) -> None:
        """Record that the collection of ``update`` keeps or drops these finished groups."""
        with self._lock:
            for group_index in group_indices:
                entry = self._entry(group_index)
                if entry.waiting or entry.update is not None:
                    raise ContractViolation(
                        f"prompt group {group_index} cannot join collection {update}: it "
                        + ("waits" if entry.waiting else f"is in collection {entry.update}")
                    )
                entry.update = update

    def release(self, group_indices: Iterable[int]) -> None:
        """Take finished groups out of a collection that was not committed; they stay handed out."""
        with self._lock:
            for group_index in group_indices:
                self._entry(group_index).update = None

    def give_back_from(self, update: int) -> None:
        """Take apart collections ``update`` and later, made under an epoch that is over.

        Their groups go to the front in hand-out order, as they were.
        """
        with self._lock:
            stale = [
                entry.draw.group_index
                for entry in self._in_order()
                if entry.update is not None and entry.update >= update
            ]
            self.requeue(stale, failed=False)

    def forget(self, consumed_through: int) -> None:
        """Drop the groups of collections up to ``consumed_through``: they are trained."""
        with self._lock:
            for group_index, entry in tuple(self._ledger.items()):
                if entry.update is not None and entry.update <= consumed_through:
                    del self._ledger[group_index]

    @property
    def most_stale(self) -> int:
        """Most times that a prompt of the ledger went stale."""
        with self._lock:
            return max((entry.draw.stale for entry in self._ledger.values()), default=0)

    def snapshot(self, consumed_through: int) -> DataState:
        """Cursor and every draw not consumed by an update up to ``consumed_through``."""
        with self._lock:
            pending = tuple(
                entry.draw
                for entry in self._in_order()
                if entry.update is None or entry.update > consumed_through
            )
            return self._cursor.model_copy(update={"pending": pending})

    def adopt(
        self,
        update: int,
        groups: Sequence[SampleGroup],
        after: DataState,
        dropped: Iterable[PromptDraw] = (),
    ) -> None:
        """Take over a committed collection that this source does not remember making.

        ``after`` and ``dropped`` are recorded with it. Groups of earlier collections stay theirs;
        whatever was drawn since ``after`` was taken will be drawn again.
        """
        rows = {each.metadata.prepared_sample_id: row for row, each in enumerate(self._prompts)}
        with self._lock:
            kept = {
                index: entry
                for index, entry in self._ledger.items()
                if entry.update is not None and entry.update < update
            }
            self._restore(after)
            self._ledger.update(kept)
            for group in groups:
                draw = PromptDraw(
                    group_index=group.group_index,
                    first_sample_index=group.samples[0].sample_index,
                    epoch_id=group.epoch_id,
                    row=rows[group.prepared_sample_id],
                    prepared_sample_id=group.prepared_sample_id,
                )
                self._ledger[draw.group_index] = _Entry(draw, update=update)
            for draw in dropped:
                self._ledger[draw.group_index] = _Entry(draw, update=update)

    def _next_row(self) -> _Entry:
        cursor = self._cursor
        epoch, offset = cursor.epoch_id, cursor.sample_offset
        if offset == len(self._prompts):
            epoch, offset = epoch + 1, 0
        row = self._order_of(epoch)[offset]
        entry = _Entry(
            PromptDraw(
                group_index=cursor.sample_group_index,
                first_sample_index=cursor.sample_index,
                epoch_id=epoch,
                row=row,
                prepared_sample_id=self._prompts[row].metadata.prepared_sample_id,
            )
        )
        self._ledger[entry.draw.group_index] = entry
        self._cursor = cursor.model_copy(
            update={
                "epoch_id": epoch,
                "sample_offset": offset + 1,
                "sample_group_index": cursor.sample_group_index + 1,
                "sample_index": cursor.sample_index + self._samples_per_prompt,
            }
        )
        return entry

    def _order_of(self, epoch: int) -> list[int]:
        if self._order_epoch != epoch:
            self._order = list(range(len(self._prompts)))
            if self._shuffle:
                random.Random(f"{self._seed}:epoch:{epoch}").shuffle(self._order)
            self._order_epoch = epoch
        return self._order

    def _entry(self, group_index: int) -> _Entry:
        entry = self._ledger.get(group_index)
        if entry is None:
            raise ContractViolation(
                f"prompt group {group_index} is not in the ledger: never handed out, or done"
            )
        return entry

    def _in_order(self) -> list[_Entry]:
        """Entries by group index, which is hand-out order."""
        return [self._ledger[index] for index in sorted(self._ledger)]

    def _restore(self, state: DataState) -> None:
        """Start from ``state``: its pending draws wait, in hand-out order."""
        if state.train_sha256 not in ("", self._train_sha256):
            raise ConfigurationError(
                f"the data position belongs to a training file with SHA-256 {state.train_sha256}, "
                f"the prepared one has {self._train_sha256}: start a new run for other data"
            )
        if not 0 <= state.sample_offset <= len(self._prompts):
            raise ContractViolation(
                f"data position {state.sample_offset} is outside the {len(self._prompts)} prompts"
            )
        for draw in state.pending:
            self._check_draw(draw, state)
        indices = [draw.group_index for draw in state.pending]
        if len(set(indices)) != len(indices):
            raise ContractViolation(f"the ledger names a prompt group twice: {indices}")
        self._ledger = {draw.group_index: _Entry(draw, waiting=True) for draw in state.pending}
        self._waiting = deque(indices)
        self._cursor = state.model_copy(update={"pending": (), "train_sha256": self._train_sha256})

    def _check_draw(self, draw: PromptDraw, state: DataState) -> None:
        known = draw.row < len(self._prompts)
        sample_id = self._prompts[draw.row].metadata.prepared_sample_id if known else None
        if sample_id != draw.prepared_sample_id or draw.group_index >= state.sample_group_index:
            raise ContractViolation(
                f"the ledger's prompt group {draw.group_index} is sample "
                f"{draw.prepared_sample_id!r} at row {draw.row}; the training file has "
                f"{sample_id!r} there and {state.sample_group_index} groups were handed out"
            )
