"""Which finished groups train: age, wholeness, one policy, and what becomes of the others."""

import pytest

from activities.rollout.completed import CompletedQueue, FinishedGroup
from activities.rollout.consumption import Consumption
from activities.rollout.policy import ServedPolicy
from activities.rollout.queue_metrics import QueueMetrics
from activities.rollout.selection import Selection
from activities.rollout.source import PromptSource
from models.errors import ContractViolation
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan

PREFIX = "rollout/fully_async/"


class Rig:
    """A queue with groups whose tokens have the given versions, and everything around it."""

    def __init__(self, rollout_rig, published, **sections):
        spec = rollout_rig.async_spec(**sections)
        self.source = PromptSource(
            rollout_rig.prompts(20), seed=1, shuffle=False, samples_per_prompt=2, train_sha256="a"
        )
        self.completed = CompletedQueue(20)
        self.selection = Selection(2, False)
        self.metrics = QueueMetrics()
        self.consumption = Consumption(
            spec, self.source, self.completed, self.selection, ServedPolicy(published), self.metrics
        )

    def finish(self, *versions, samples=2):
        """Queue a group; each version samples one token of each response."""
        draw = self.source.draw(1)[0]
        spans = [TokenSpan(version, at, at + 1) for at, version in enumerate(versions)]
        made = [
            Sample(index, draw.group_index, [1], [2] * len(spans), [-1.0], spans, FinishReason.STOP)
            for index in range(samples)
        ]
        group = SampleGroup(draw.group_index, draw.prepared_sample_id, draw.epoch_id, made)
        assert self.completed.put(FinishedGroup(draw, group))

    def taken(self):
        """Group indices of everything that may train."""
        found = []
        while (finished := self.consumption.take()) is not None:
            found.append(finished.draw.group_index)
        return found

    def window(self):
        return self.metrics.collect(len(self.completed), ())


@pytest.mark.parametrize(
    ("lag", "minibatch", "limit"),
    [(2, None, 2), (2, 2, 1), (6, None, 6), (3, 1, 0)],
)
def test_the_limit_shrinks_by_the_steps_of_an_update(rig, lag, minibatch, limit):
    """Four samples an update: K = 4 / minibatch, and the age limit is the lag less K - 1."""
    training = {"global_batch_size": minibatch} if minibatch else {}
    made = Rig(rig, published=9, core={"max_policy_lag": lag}, training=training)
    for age in range(8):
        made.finish(9 - age)
    assert made.taken() == [*range(limit + 1)]
    assert made.window()[f"{PREFIX}stale_groups_filtered"] == 8 - (limit + 1)


def test_the_oldest_version_of_any_token_counts(rig):
    made = Rig(rig, 8, core={"max_policy_lag": 2, "publication_mode": "refresh"})
    made.finish(5, 7)  # age 3 though its last token is one step old
    made.finish(6, 8)
    assert made.taken() == [1]
    metrics = made.window()
    assert metrics[f"{PREFIX}completed_queue/dropped_samples_by_age/3"] == 2
    assert metrics[f"{PREFIX}completed_queue/dropped_response_tokens"] == 4


def test_stale_prompts_go_first_in_their_order_with_their_identities(rig):
    made = Rig(rig, 5, core={"max_policy_lag": 1})
    for version in (2, 3, 1, 5, 5):
        made.finish(version)
    assert made.taken() == [3, 4]
    again = made.source.draw(4)
    assert [draw.group_index for draw in again] == [0, 1, 2, 5]
    assert [draw.stale for draw in again] == [1, 1, 1, 0]
    assert [draw.requeues for draw in again] == [0] * 4
    assert made.selection.take().dropped == {}


def test_the_handler_drop_drops_with_the_reason(rig):
    handler = {"async_unused_samples_handler": "drop"}
    made = Rig(rig, 5, core={"max_policy_lag": 1}, **{"async": handler})
    made.finish(1)
    made.finish(5)
    assert made.taken() == [1]
    window = made.selection.take()
    assert [(index, each.reason) for index, each in window.dropped.items()] == [(0, "stale")]
    assert window.tally.dropped == {"stale": 1}
    assert made.source.draw(1)[0].group_index == 2
    assert [draw.group_index for draw in made.source.snapshot(-1).pending] == [0, 1, 2]


def test_a_prompt_goes_stale_max_requeues_times_and_is_dropped_then(rig):
    made = Rig(rig, 5, core={"max_policy_lag": 1}, **{"async": {"max_requeues": 2}})
    for count in (1, 2):
        made.finish(1)
        assert made.taken() == []
        assert made.source.most_stale == count
        assert made.selection.num_dropped == 0
    made.finish(1)
    assert made.taken() == []
    dropped = made.selection.take().dropped
    assert [(index, each.reason) for index, each in dropped.items()] == [(0, "max_requeues")]
    assert dropped[0].draw.stale == 2
    assert made.source.draw(1)[0].group_index == 1


@pytest.mark.parametrize("mode", ["barrier", "rolling"])
def test_groups_of_no_single_policy_are_unused(rig, mode):
    made = Rig(rig, 5, core={"max_policy_lag": 9, "publication_mode": mode})
    made.finish(5)
    made.finish(4, 5)
    made.finish(5, samples=1)
    made.finish(6)  # of a version that is not published everywhere yet
    assert made.taken() == [0]
    metrics = made.window()
    for reason in ("mixed_policy", "incomplete", "policy"):
        assert metrics[f"{PREFIX}rejected_{reason}_groups"] == 1
    assert metrics[f"{PREFIX}stale_groups_filtered"] == 0
    assert [draw.group_index for draw in made.source.draw(3)] == [1, 2, 3]


def test_a_missing_sample_is_an_error_where_versions_mix(rig):
    made = Rig(rig, 5, core={"max_policy_lag": 9, "publication_mode": "refresh"})
    made.finish(5, samples=1)
    for _ in range(2):  # the group stays where it is
        with pytest.raises(ContractViolation, match="prompt group 0 has 1 samples, expected 2"):
            made.consumption.take()
    assert len(made.completed) == 1


def test_a_batch_is_checked_again_as_a_whole(rig):
    made = Rig(rig, 5, core={"max_policy_lag": 1})
    policy = made.consumption._policy
    for version in (4, 5, 4):
        made.finish(version)
    batch = [made.consumption.take() for _ in range(3)]
    policy.begin(6, holds=False)
    policy.end(6)
    fresh = made.consumption.still_fresh(batch)
    assert [finished.draw.group_index for finished in fresh] == [1]
    assert [draw.group_index for draw in made.source.draw(2)] == [0, 2]


def test_the_queue_keeps_order_and_refuses_only_what_is_new(rig):
    made = Rig(rig, 0)
    queue = CompletedQueue(2)
    for _ in range(5):
        made.finish(0)
    groups = list(made.completed)
    assert [queue.put(group) for group in groups[:3]] == [True, True, False]
    taken = [queue.take(), queue.take()]
    assert queue.take() is None
    assert queue.put(groups[2])
    queue.give_back(taken)
    assert list(queue) == groups[:3]
    assert (queue.is_full, queue.is_overfull) == (True, True)
    queue.widen(1)
    assert queue.capacity == 4
    assert [queue.put(group) for group in groups[3:]] == [True, False]
    queue.restore()
    assert queue.capacity == 2
    assert len(queue) == 4


def test_a_queue_of_no_capacity_still_passes_one_group_on(rig):
    made = Rig(rig, 0)
    made.finish(0)
    assert CompletedQueue(0).put(next(iter(made.completed)))
