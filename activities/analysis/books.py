"""The lives of prompts while artifact after artifact is entered."""

import contextlib
from collections import Counter, defaultdict

from activities.analysis.evidence import Evidence, Position
from activities.analysis.line import FinalLine, LineUpdate
from activities.analysis.lives import Fate, PromptLife
from activities.rollout.collection_file import GroupIdentity, GroupOutcome, read_outcomes
from activities.storage import layout
from activities.storage.store import Store
from models.errors import PerdureError
from models.prompt import PromptDraw
from models.rollout import CollectionManifest

NOT_RECORDED = "reason not recorded"
"""Drop reason of a group that its manifest counts and does not name."""
IN_LEDGER = "in the ledger: waiting, generating or finished"


class Books:
    """See the module. Enter the line, what is ahead, then the position, then the history."""

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
            for outcome in groups:
                life = self._hold(each.update, outcome)
                self.trained += [outcome.identity] * outcome.times
                life.trained += [(each.update, each.policy_version)] * outcome.times
                life.fate, life.reason = Fate.TRAINED, ""
                life.incomplete |= outcome.samples != (
                    self._evidence.samples_per_prompt or outcome.samples
                )
            if each.manifest is not None:
                self._add_dropped(each.manifest)

    def add_ahead(self) -> None:
        """Enter collections that wait for their update."""
        for manifest in self._line.ahead:
            for outcome in self._read(manifest):
                life = self._hold(manifest.collection.update, outcome)
                if life.fate is not Fate.TRAINED:
                    life.fate = Fate.PENDING
                    life.reason = f"collected for update {manifest.collection.update}"
            self._add_dropped(manifest)

    def settle(self, position: Position) -> None:
        """Enter the ledger, and find what is drawn without a fate or has more than one."""
        owed_again = 0
        for draw in position.state.pending:
            life = self._life(_identity(draw))
            life.tell(draw)
            if life.fate is Fate.MISSING:
                life.fate, life.reason = Fate.PENDING, IN_LEDGER
            elif any(update <= position.consumed for update in life.consumed):
                life.doubled = True
                owed_again += 1
            if draw.group_index >= position.state.sample_group_index:  # and will be drawn again
                life.doubled = True
                owed_again += 1
        drawn = max(position.state.sample_group_index, max(self.lives, default=-1) + 1)
        for index in range(drawn):
            self.lives.setdefault(index, PromptLife(index))
        self.doubled = owed_again + self._consumed_again() + self._drawn_again()
        self.dropped.update(
            life.reason for life in self.lives.values() if life.fate is Fate.DROPPED
        )
        self._place_unnamed_drops()

    def wrong_in(self, position: Position) -> list[int]:
        """Groups that who resumes from an older position would lose, or train again.

        Those that are wrong anyway are not repeated. What a collection that cannot be read, or
        names no drops, consumed is not known; then nothing is said.
        """
        if self.unreadable or self._unnamed:
            return []
        owed = {draw.group_index for draw in position.state.pending}
        wrong = []
        for index in range(position.state.sample_group_index):
            # A rebuilt producer may not have drawn yet what the checkpoint has seen drawn.
            life = self.lives.get(index, PromptLife(index, fate=Fate.PENDING))
            is_consumed = any(update <= position.consumed for update in life.consumed)
            if is_consumed == (index in owed) and not life.is_wrong:
                wrong.append(index)
        return wrong

    def add_history(self) -> None:
        """Enter what undone collections held and what older ledgers tell.

        An older ledger may be the only one to name who is missing, or to count how often a prompt
        was sampled again.
        """
        for manifest in self._line.abandoned:
            collection = manifest.collection
            with contextlib.suppress(OSError, ValueError, KeyError, PerdureError):
                for outcome in read_outcomes(self._store, collection.uri, collection.sha256):
                    if outcome.identity.group_index in self.lives:
                        undone = (collection.update, collection.epoch)
                        self._name(outcome.identity).abandoned.append(undone)
        undone_manifests = {id(manifest) for manifest in self._line.abandoned}
        for manifest in self._evidence.manifests.values():
            for draw in manifest.data_after.pending:
                if draw.group_index in self.lives:
                    if id(manifest) in undone_manifests:
                        self._name(_identity(draw))
                    else:
                        self._life(_identity(draw)).tell(draw)

    def _consumed_again(self) -> int:
        """Times beyond the first that a collection keeps or drops a group."""
        again = [life for life in self.lives.values() if len(life.consumed) > 1]
        for life in again:
            life.doubled = True
        return sum(len(life.consumed) - 1 for life in again)

    def _drawn_again(self) -> int:
        """Hand-outs beyond the first of a prompt in one pass over the data."""
        hand_outs: defaultdict[tuple[str, int | None], list[PromptLife]] = defaultdict(list)
        for life in self.lives.values():
            if life.prepared_sample_id is not None:
                hand_outs[life.prepared_sample_id, life.epoch_id].append(life)
        again = [lives for lives in hand_outs.values() if len(lives) > 1]
        for lives in again:
            for life in lives:
                life.doubled = True
        return sum(len(lives) - 1 for lives in again)

    def _place_unnamed_drops(self) -> None:
        """Manifests without a list of drops only count them: these explain who is missing."""
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
        collection = manifest.collection
        for each in manifest.dropped:
            life = self._life(_identity(each.draw))
            life.consumed.append(collection.update)
            life.tell(each.draw)
            if life.fate is Fate.MISSING:
                life.fate, life.reason = Fate.DROPPED, each.reason
        if "dropped" not in manifest.model_fields_set:
            self._unnamed.update(collection.counts.filtered_groups)

    def _hold(self, update: int, outcome: GroupOutcome) -> PromptLife:
        """Enter a group that a collection of the final line keeps."""
        life = self._life(outcome.identity)
        life.samples += outcome.samples
        life.scored += outcome.scored
        life.consumed += [update] * outcome.times
        return life

    def _groups_of(self, update: LineUpdate) -> list[GroupOutcome]:
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

    def _read(self, manifest: CollectionManifest) -> list[GroupOutcome]:
        return self._read_file(manifest.collection.uri, manifest.collection.sha256)

    def _read_file(self, uri: str, sha256: str) -> list[GroupOutcome]:
        read = self._evidence.try_read(uri, lambda: read_outcomes(self._store, uri, sha256))
        return read or []

    def _life(self, identity: GroupIdentity) -> PromptLife:
        """The life under that number, told by a file of the final line that it is this prompt's."""
        life = self._name(identity)
        named = (life.prepared_sample_id, life.epoch_id)
        life.mixed_up |= named != (identity.prepared_sample_id, identity.epoch_id)
        return life

    def _name(self, identity: GroupIdentity) -> PromptLife:
        """The life under that number; the first file to name it says which prompt it is."""
        life = self.lives.setdefault(identity.group_index, PromptLife(identity.group_index))
        if life.prepared_sample_id is None:
            life.prepared_sample_id = identity.prepared_sample_id
            life.epoch_id = identity.epoch_id
        return life


def _identity(draw: PromptDraw) -> GroupIdentity:
    return GroupIdentity(draw.group_index, draw.prepared_sample_id, draw.epoch_id)
