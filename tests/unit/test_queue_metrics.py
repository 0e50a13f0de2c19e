"""Counters of the queue of finished groups: worked values, every key, and the reset."""

import pytest

from activities.rollout.queue_metrics import AGE_BINS, QueueMetrics, age_bin, length_bin
from models.metrics import refuse_undeclared
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan

LENGTHS = (
    "0_255", "256_511", "512_1023", "1024_2047",
    "2048_4095", "4096_8191", "8192_16383", "16384_plus",
)  # fmt: skip
AGES = ("0", "1", "2", "3", "4", "5_8", "9_16", "17_plus", "unknown")
QUEUE = "rollout/fully_async/completed_queue"
KEYS = {
    "rollout/fully_async/queue_size",
    "rollout/fully_async/aborted_groups_filtered",
    "rollout/fully_async/stale_groups_filtered",
    "rollout/fully_async/avg_staleness",
    "rollout/fully_async/max_staleness",
    "rollout/fully_async/buffer_avg_staleness",
    "rollout/fully_async/buffer_max_staleness",
    "rollout/fully_async/rejected_policy_groups",
    "rollout/fully_async/rejected_incomplete_groups",
    "rollout/fully_async/rejected_mixed_policy_groups",
    f"{QUEUE}/dropped_groups",
    f"{QUEUE}/dropped_samples",
    f"{QUEUE}/dropped_response_tokens",
    f"{QUEUE}/delivered_groups",
    f"{QUEUE}/delivered_samples",
    f"{QUEUE}/delivered_response_tokens",
    f"{QUEUE}/dropped_groups_fraction",
    f"{QUEUE}/dropped_samples_fraction",
    f"{QUEUE}/dropped_response_tokens_fraction",
    f"{QUEUE}/consumer_wait_seconds",
    *(f"{QUEUE}/dropped_samples_by_length/{name}" for name in LENGTHS),
    *(f"{QUEUE}/delivered_samples_by_length/{name}" for name in LENGTHS),
    *(f"{QUEUE}/dropped_samples_fraction_by_length/{name}" for name in LENGTHS),
    *(f"{QUEUE}/dropped_samples_by_age/{name}" for name in AGES),
    *(f"{QUEUE}/delivered_samples_by_age/{name}" for name in AGES),
    *(f"{QUEUE}/dropped_samples_fraction_by_age/{name}" for name in AGES),
}


def group(*lengths: int) -> SampleGroup:
    samples = [
        Sample(
            sample_index=index,
            group_index=0,
            prompt_token_ids=[1],
            response_token_ids=[2] * length,
            logprobs=[-1.0] * length,
            spans=[TokenSpan(0, 0, length)],
            finish_reason=FinishReason.STOP,
        )
        for index, length in enumerate(lengths)
    ]
    return SampleGroup(group_index=0, prepared_sample_id="p", epoch_id=0, samples=samples)


def test_every_key_is_there_when_nothing_happened() -> None:
    metrics = QueueMetrics().collect(0, [])
    assert metrics == dict.fromkeys(KEYS, 0.0)
    refuse_undeclared(metrics)


def test_dropped_and_delivered_groups_are_counted_by_length_and_age() -> None:
    queue = QueueMetrics()
    queue.dropped(group(4096, 512), 3)
    queue.delivered(group(100, 200), 1)
    metrics = queue.collect(0, [])
    expected = {
        "dropped_groups": 1,
        "dropped_samples": 2,
        "dropped_response_tokens": 4608,
        "delivered_groups": 1,
        "delivered_samples": 2,
        "delivered_response_tokens": 300,
        "dropped_groups_fraction": 0.5,
        "dropped_samples_fraction": 0.5,
        "dropped_response_tokens_fraction": 4608 / 4908,
        "dropped_samples_by_length/4096_8191": 1,
        "dropped_samples_by_length/512_1023": 1,
        "delivered_samples_by_length/0_255": 2,
        "dropped_samples_by_age/3": 2,
        "delivered_samples_by_age/1": 2,
        "dropped_samples_fraction_by_length/4096_8191": 1,
        "dropped_samples_fraction_by_length/512_1023": 1,
        "dropped_samples_fraction_by_age/3": 1,
    }
    nonzero = {
        name.removeprefix(f"{QUEUE}/"): value
        for name, value in metrics.items()
        if value and name.startswith(QUEUE)
    }
    assert nonzero == pytest.approx(expected)
    assert set(metrics) == KEYS
    # staleness is that of what the trainer gets: the group of age 3 does not count
    assert metrics["rollout/fully_async/avg_staleness"] == 1.0
    assert metrics["rollout/fully_async/max_staleness"] == 1.0


def test_the_rest_of_the_window_and_what_waits() -> None:
    queue = QueueMetrics()
    queue.delivered(group(1), 0)
    queue.delivered(group(1), 3)
    queue.delivered(group(1), None)
    queue.rejected("policy")
    queue.rejected("mixed_policy")
    queue.rejected("mixed_policy")
    queue.aborted()
    queue.stale()
    queue.stale()
    queue.waited(0.25)
    queue.waited(0.5)
    metrics = queue.collect(4, [0, 1, 2])
    named = {name.removeprefix("rollout/fully_async/"): value for name, value in metrics.items()}
    assert named["queue_size"] == 4
    assert named["avg_staleness"] == 1.5
    assert named["max_staleness"] == 3
    assert named["buffer_avg_staleness"] == 1.0
    assert named["buffer_max_staleness"] == 2
    assert named["rejected_policy_groups"] == 1
    assert named["rejected_incomplete_groups"] == 0
    assert named["rejected_mixed_policy_groups"] == 2
    assert named["aborted_groups_filtered"] == 1
    assert named["stale_groups_filtered"] == 2
    assert named["completed_queue/consumer_wait_seconds"] == 0.75
    assert named["completed_queue/delivered_samples_by_age/unknown"] == 1


def test_collecting_begins_a_new_window() -> None:
    queue = QueueMetrics()
    queue.dropped(group(9), None)
    queue.delivered(group(9), 2)
    queue.rejected("incomplete")
    queue.aborted()
    queue.stale()
    queue.waited(1.0)
    queue.collect(1, [2])
    assert queue.collect(0, []) == dict.fromkeys(KEYS, 0.0)


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (0, "0_255"), (255, "0_255"), (256, "256_511"), (511, "256_511"), (512, "512_1023"),
        (1023, "512_1023"), (1024, "1024_2047"), (2047, "1024_2047"), (2048, "2048_4095"),
        (4095, "2048_4095"), (4096, "4096_8191"), (8191, "4096_8191"), (8192, "8192_16383"),
        (16383, "8192_16383"), (16384, "16384_plus"), (1_000_000, "16384_plus"),
    ],
)  # fmt: skip
def test_a_response_is_counted_by_its_length(tokens: int, name: str) -> None:
    assert length_bin(tokens) == name


@pytest.mark.parametrize(
    ("age", "name"),
    [
        (None, "unknown"), (0, "0"), (1, "1"), (2, "2"), (3, "3"), (4, "4"), (5, "5_8"),
        (8, "5_8"), (9, "9_16"), (16, "9_16"), (17, "17_plus"), (400, "17_plus"),
        # sampled by an engine that is ahead of the fleet in a rolling publication
        (-1, "0"),
    ],
)  # fmt: skip
def test_a_group_is_counted_by_its_age(age: int | None, name: str) -> None:
    assert age_bin(age) == name
    assert name in (*AGE_BINS, "unknown")


def test_a_collection_that_was_not_committed_loses_no_drop_and_delivers_nothing() -> None:
    """Before the failed one: 4096 and 512 tokens at age 3. After it: 300 and 300 at age 2."""
    queue = QueueMetrics()
    queue.dropped(group(4096, 512), 3)
    queue.stale()
    queue.rejected("mixed_policy")
    queue.delivered(group(100, 200), 1)
    queue.waited(4.0)
    first = queue.collect(0, [])
    queue.dropped(group(300, 300), 2)
    queue.aborted()
    queue.give_back()
    queue.delivered(group(100, 200), 2)
    second = queue.collect(0, [])
    told = {name: value for name, value in second.items() if value}
    assert told == pytest.approx(
        {
            "rollout/fully_async/aborted_groups_filtered": 1,
            "rollout/fully_async/stale_groups_filtered": 1,
            "rollout/fully_async/rejected_mixed_policy_groups": 1,
            "rollout/fully_async/avg_staleness": 2,
            "rollout/fully_async/max_staleness": 2,
            f"{QUEUE}/dropped_groups": 2,
            f"{QUEUE}/dropped_samples": 4,
            f"{QUEUE}/dropped_response_tokens": 5208,
            f"{QUEUE}/delivered_groups": 1,
            f"{QUEUE}/delivered_samples": 2,
            f"{QUEUE}/delivered_response_tokens": 300,
            f"{QUEUE}/dropped_groups_fraction": 2 / 3,
            f"{QUEUE}/dropped_samples_fraction": 4 / 6,
            f"{QUEUE}/dropped_response_tokens_fraction": 5208 / 5508,
            f"{QUEUE}/dropped_samples_by_length/256_511": 2,
            f"{QUEUE}/dropped_samples_by_length/512_1023": 1,
            f"{QUEUE}/dropped_samples_by_length/4096_8191": 1,
            f"{QUEUE}/dropped_samples_fraction_by_length/256_511": 1,
            f"{QUEUE}/dropped_samples_fraction_by_length/512_1023": 1,
            f"{QUEUE}/dropped_samples_fraction_by_length/4096_8191": 1,
            f"{QUEUE}/delivered_samples_by_length/0_255": 2,
            f"{QUEUE}/dropped_samples_by_age/2": 2,
            f"{QUEUE}/dropped_samples_by_age/3": 2,
            f"{QUEUE}/delivered_samples_by_age/2": 2,
            f"{QUEUE}/dropped_samples_fraction_by_age/2": 0.5,
            f"{QUEUE}/dropped_samples_fraction_by_age/3": 1,
        }
    )
    assert first[f"{QUEUE}/delivered_samples"] == 2
    queue.collect(0, [])
    assert queue.collect(0, []) == dict.fromkeys(KEYS, 0.0)  # and nothing counts a third time
