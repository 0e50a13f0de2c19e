"""Which finished groups a collection may take: young enough, whole, of one policy where it must."""

from typing import Literal

import structlog

from activities.rollout.completed import CompletedQueue, FinishedGroup
from activities.rollout.policy import ServedPolicy
from activities.rollout.queue_metrics import QueueMetrics, RejectReason
from activities.rollout.selection import Selection
from activities.rollout.source import PromptSource
from configs.run import RunSpec
from models.errors import ContractViolation

STALE = "stale"
"""Drop reason of a group that is too old, under the handler ``drop``."""
MAX_REQUEUES = "max_requeues"
"""Drop reason of a prompt whose groups went stale too often."""

_log = structlog.get_logger(__name__)


class Consumption:
    """Takes groups out of the queue, and does away with those that may not train.

    Such a group is *unused*: its prompt is sampled again, with the same identity and before any
    other, or dropped.

    A group's age is the published version minus the oldest version of any of its tokens. With K
    optimizer steps an update the limit is K - 1 below ``core.max_policy_lag``, so that the last of
    the steps still keeps to that.
    """

    def __init__(
        self,
        spec: RunSpec,
        source: PromptSource,
        completed: CompletedQueue,
        selection: Selection,
        policy: ServedPolicy,
        metrics: QueueMetrics,
    ) -> None:
        self._samples_per_prompt = spec.training.samples_per_prompt
        self._max_age = spec.max_group_age
        self._mixes = spec.core.publication_mode == "refresh"
        self._handler: Literal["retry", "drop"] = spec.asynchronous.async_unused_samples_handler
        self._max_requeues = spec.asynchronous.max_requeues
        self._source = source
        self._completed = completed
        self._selection = selection
        self._policy = policy
        self._metrics = metrics

    def take(self) -> FinishedGroup | None:
        """The oldest group that may train; those before it that may not are done away with.

        Raises:
            ContractViolation: a group lacks samples although nothing ends a sample early.
        """
        unused: list[FinishedGroup] = []
        try:
            while (finished := self._completed.take()) is not None:
                self._require_whole(finished)
                if self._may_train(finished):
                    return finished
                unused.append(finished)
            return None
        finally:
            self._sample_again(unused)

    def still_fresh(self, batch: list[FinishedGroup]) -> list[FinishedGroup]:
        """The groups of ``batch`` that may train under the version that is published now."""
        fresh: list[FinishedGroup] = []
        unused: list[FinishedGroup] = []
        for finished in batch:
            (fresh if self._may_train(finished) else unused).append(finished)
        self._sample_again(unused)
        return fresh

    def age(self, finished: FinishedGroup) -> int:
        """In optimizer steps; below 0 for a group of a version that is not published yet."""
        return self._policy.published - finished.group.oldest_version

    def _require_whole(self, finished: FinishedGroup) -> None:
        """Where versions may mix, nothing ends a sample early, so none can be missing."""
        group = finished.group
        if self._mixes and len(group.samples) != self._samples_per_prompt:
            self._completed.give_back([finished])
            raise ContractViolation(
                f"prompt group {group.group_index} has {len(group.samples)} samples, expected "
                f"{self._samples_per_prompt}"
            )

    def _may_train(self, finished: FinishedGroup) -> bool:
        reason = None if self._mixes else self._rejection(finished)
        if reason is not None:
            self._metrics.rejected(reason)
            self._put_aside(finished, f"rejected_{reason}")
            return False
        if self.age(finished) > self._max_age:
            self._metrics.stale()
            self._put_aside(finished, STALE)
            return False
        return True

    def _rejection(self, finished: FinishedGroup) -> RejectReason | None:
        """Why a group is none of one policy, as it must be where responses do not mix."""
        group = finished.group
        if len(group.samples) != self._samples_per_prompt:
            return "incomplete"
        if len(group.versions) > 1:
            return "mixed_policy"
        return "policy" if self.age(finished) < 0 else None

    def _put_aside(self, finished: FinishedGroup, reason: str) -> None:
        draw, age = finished.draw, self.age(finished)
        self._metrics.dropped(finished.group, age)
        if self._handler == "drop":
            self._selection.drop(draw, reason)
        elif self._max_requeues is not None and draw.stale >= self._max_requeues:
            self._selection.drop(draw, MAX_REQUEUES)
        _log.info("group_unused", group=draw.group_index, reason=reason, age=age, stale=draw.stale)

    def _sample_again(self, unused: list[FinishedGroup]) -> None:
        """Requeue, in the order of the queue, what was not dropped for good."""
        again = [
            finished.draw.group_index
            for finished in unused
            if not self._selection.has_dropped(finished.draw)
        ]
        self._source.requeue(again, failed=False, stale=True)
