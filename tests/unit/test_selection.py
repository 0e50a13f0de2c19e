"""What a free-running producer keeps: ties are filtered, but not for ever; scores must exist."""

import math

import pytest

from activities.rollout.selection import Selection
from models.errors import ContractViolation
from models.prompt import PromptDraw
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan

BATCH = 3


def made(index, rewards):
    draw = PromptDraw(
        group_index=index, first_sample_index=0, epoch_id=0, row=0, prepared_sample_id=f"p{index}"
    )
    samples = [
        Sample(0, index, [1], [2], [-1.0], [TokenSpan(0, 0, 1)], FinishReason.STOP, reward=reward)
        for reward in rewards
    ]
    return draw, SampleGroup(index, draw.prepared_sample_id, 0, samples)


def test_the_window_counts_everything_and_names_what_was_dropped():
    selection = Selection(BATCH, True)
    assert selection.keeps(*made(0, [0.0, 1.0]))
    assert not selection.keeps(*made(2, [1.0, 1.0]))
    assert not selection.keeps(*made(1, [0.0, 0.0]))
    selection.add_fault("timeout")
    window = selection.take()
    assert {index: each.reason for index, each in window.dropped.items()} == {
        2: "zero_std_1.0",
        1: "zero_std_0.0",
    }
    assert window.tally.dropped == {"zero_std_1.0": 1, "zero_std_0.0": 1}
    assert window.tally.faults == {"timeout": 1}
    assert (window.tally.reward_sum, window.tally.scored_samples) == (2.0, 4)  # the dropped ones
    assert selection.take().tally.scored_samples == 0


def test_a_window_that_was_not_committed_is_named_by_the_next_collection():
    selection = Selection(BATCH, True)
    selection.keeps(*made(0, [1.0, 1.0]))
    taken = selection.take()
    selection.keeps(*made(1, [0.0, 1.0]))
    selection.keeps(*made(2, [0.0, 0.0]))
    selection.give_back(taken)
    window = selection.take()
    assert sorted(window.dropped) == [0, 2]
    assert window.tally.dropped == {"zero_std_1.0": 1, "zero_std_0.0": 1}
    assert (window.tally.reward_sum, window.tally.scored_samples) == (2.0, 4)


def test_a_policy_that_always_ties_is_not_filtered_for_ever():
    selection = Selection(BATCH, True)
    kept = [selection.keeps(*made(index, [0.0, 0.0])) for index in range(16 * BATCH + BATCH)]
    assert kept == [False] * 16 * BATCH + [True] * BATCH
    selection.take()
    assert not selection.keeps(*made(0, [0.0, 0.0]))  # counted anew for each collection


def test_a_queue_of_many_batches_widens_the_limit():
    selection = Selection(BATCH, True)
    for index in range(10 * BATCH):
        assert selection.keeps(*made(index, [0.0, 1.0]))
    ties = [selection.keeps(*made(index, [0.0, 0.0])) for index in range(16 * BATCH + 1)]
    assert not any(ties)


def test_a_group_without_a_score_is_dropped_and_too_many_are_fatal():
    selection = Selection(BATCH, False)
    for index in range(4 * BATCH):
        assert not selection.keeps(*made(index, [1.0, math.nan]))
    with pytest.raises(ContractViolation, match="13 groups of one collection could not be scored"):
        selection.keeps(*made(99, [math.nan, 1.0]))
    assert {each.reason for each in selection.take().dropped.values()} == {"verifier_error"}
