"""The groups of one training collection: draw, keep or drop, top up until the batch is full.

Which groups are kept depends on the draw order alone, not on which attempt ends first: at any time
kept + running + still to draw = batch, so exactly the first draws are made among which a batch of
groups passes the filter.
"""

import structlog

from activities.rollout.admission import AdmissionGate
from activities.rollout.attempt import GroupSampler
from activities.rollout.filters import VERIFIER_ERROR, drop_reason
from activities.rollout.policy import ServedPolicy
from activities.rollout.source import PromptSource
from activities.rollout.summary import SampledTally
from activities.rollout.unscored import ERROR_FACTOR, complaint, refuse_broken_verifier
from models.errors import GenerationFault
from models.prompt import PromptDraw
from models.rollout import DroppedGroup
from models.sample import SampleGroup

FILTER_FACTOR = 16
"""Draws of a collection beyond this many batches are kept even when their rewards tie: a policy
that always ties would otherwise sample for ever and the run would never end."""

_log = structlog.get_logger(__name__)


class TrainingGroups:
    """``GroupWork`` of a collection: ``batch_size`` groups under one policy ``version``."""

    def __init__(
        self,
        source: PromptSource,
        sampler: GroupSampler,
        gate: AdmissionGate,
        *,
        version: int,
        batch_size: int,
        filter_zero_std: bool,
    ) -> None:
        self._source = source
        self._sampler = sampler
        self._gate = gate
        self._version = version
        self._batch_size = batch_size
        self._filter_zero_std = filter_zero_std
        self._ordinals: dict[int, int] = {}  # group index -> position among this collection's draws
        self._kept: dict[int, SampleGroup] = {}
        self._dropped: dict[int, str] = {}  # group index -> reason
        self._held: dict[int, PromptDraw] = {}  # drawn and not given back, dropped ones included
        self.tally = SampledTally()

    @property
    def kept(self) -> list[SampleGroup]:
        """Kept groups in draw order."""
        return [self._kept[index] for index in sorted(self._kept)]

    @property
    def dropped(self) -> list[DroppedGroup]:
        """Groups that must not train, in draw order."""
        return [
            DroppedGroup(draw=self._held[index], reason=self._dropped[index])
            for index in sorted(self._dropped)
        ]

    @property
    def samples_done(self) -> int:
        """Samples that are finished and not dropped, those of running attempts included."""
        kept = sum(len(group.samples) for group in self._kept.values())
        running = self._sampler.finished
        return kept + sum(running.get(index, 0) for index in self._held)

    @property
    def max_requeues(self) -> int:
        """Most requeues of any kept draw."""
        return max((self._held[index].requeues for index in self._kept), default=0)

    def next_draws(self, num_active: int) -> list[PromptDraw]:
        """Draws that fill the batch."""
        draws = self._source.draw(self._batch_size - len(self._kept) - num_active)
        for draw in draws:
            self._ordinals.setdefault(draw.group_index, len(self._ordinals))
            self._held[draw.group_index] = draw
        return draws

    async def attempt(self, draw: PromptDraw) -> SampleGroup:
        """Sample and score the group."""
        prompt = self._source.prompt(draw)
        return await self._sampler.attempt(
            draw, prompt, self._gate, policy=ServedPolicy(self._version), exact=self._version
        )

    def on_finished(self, draw: PromptDraw, group: SampleGroup) -> None:
        """Keep the group, or drop it when it must not train.

        A dropped draw stays held until the commit: an abandoned collection owes it as well.
        """
        exempt = self._ordinals[draw.group_index] >= FILTER_FACTOR * self._batch_size
        reason = drop_reason(group.rewards, self._filter_zero_std and not exempt)
        self.tally.add(group, reason)
        if reason is None:
            self._kept[draw.group_index] = group
            return
        self._dropped[draw.group_index] = reason
        if reason == VERIFIER_ERROR:
            _log.warning("group_not_scored", group=group.group_index, error=complaint(group))
            limit = ERROR_FACTOR * self._batch_size
            refuse_broken_verifier(self.tally.dropped[VERIFIER_ERROR], limit, group)

    def on_fault(self, draw: PromptDraw, fault: GenerationFault) -> None:
        """Requeue the whole group with its identity; nothing of the attempt is kept."""
        del self._held[draw.group_index]
        self.tally.add_fault(fault.category)
        self._source.requeue([draw.group_index])

    def is_complete(self) -> bool:
        """Whether a batch of groups is kept."""
        return len(self._kept) == self._batch_size

    def give_back(self) -> None:
        """Return every held draw to the source, in hand-out order: the collection is abandoned."""
        self._source.requeue(sorted(self._held), failed=False)
        self._held.clear()
        self._kept.clear()
        self._dropped.clear()
