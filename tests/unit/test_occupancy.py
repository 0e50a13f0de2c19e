"""A snapshot of the producer: exactly the keys of the table, null for what does not exist."""

from dataclasses import replace

from activities.rollout.occupancy import OCCUPANCY_KEYS, Held, Occupancy
from activities.rollout.recovery import ServingHealth
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan

KEYS = {
    "time_unix",
    "completed_queue",
    "producer_ready",
    "shutdown_unqueued",
    "completed_put_wait_seconds",
    "completed_put_current_wait_seconds",
    "producer_owned_groups",
    "producer_active_group_tasks",
    "producer_admission_open",
    "producer_unfinished_samples",
    "completed_queue_groups",
    "completed_queue_capacity_groups",
    "generation_admission_paused",
    "generation_admission_waiters",
    "generation_active_calls",
    "http_capacity_requests",
    "http_active_requests",
    "http_waiting_requests",
    "errors/elapsed_seconds",
    "errors/completed_group_attempts",
    "errors/requeued_groups",
    "errors/window_group_attempts",
    "errors/window_failed_groups",
    "errors/failure_fraction_5m",
    "errors/high_failure_seconds",
    "errors/transport_groups",
    "errors/overload_groups",
    "errors/unavailable_groups",
    "errors/timeout_groups",
}
SNAPSHOT = Occupancy(
    completed_queue=Held(groups=3, samples=24, response_tokens=9000),
    producer_ready=Held(groups=0, samples=0, response_tokens=0),
    shutdown_unqueued=None,
    completed_put_wait_seconds=1.5,
    completed_put_current_wait_seconds=0.0,
    producer_owned_groups=5,
    producer_active_group_tasks=5,
    producer_admission_open=True,
    producer_unfinished_samples=None,
    completed_queue_groups=3,
    completed_queue_capacity_groups=16,
    generation_admission_paused=True,
    generation_admission_waiters=16,
    generation_active_calls=0,
    http_capacity_requests=128,
    http_active_requests=0,
    http_waiting_requests=0,
    errors=ServingHealth().metrics(),
)


def test_the_keys_are_those_of_the_table() -> None:
    assert set(OCCUPANCY_KEYS) == KEYS
    assert len(OCCUPANCY_KEYS) == len(KEYS)
    # the observer adds the time
    assert set(SNAPSHOT.row()) == KEYS - {"time_unix"}


def test_what_is_held_is_told_in_three_units_or_is_null() -> None:
    row = SNAPSHOT.row()
    assert row["completed_queue"] == {"groups": 3, "samples": 24, "response_tokens": 9000}
    assert row["producer_ready"] == {"groups": 0, "samples": 0, "response_tokens": 0}
    assert row["shutdown_unqueued"] is None
    assert row["producer_unfinished_samples"] is None
    assert row["generation_admission_paused"] is True
    assert row["errors/completed_group_attempts"] == 0
    assert replace(SNAPSHOT, generation_active_calls=None).row()["generation_active_calls"] is None


def test_held_groups_are_counted() -> None:
    samples = [
        Sample(i, 0, [1], [2] * n, [0.0] * n, [TokenSpan(0, 0, n)], FinishReason.STOP)
        for i, n in enumerate((3, 4, 5))
    ]
    groups = [SampleGroup(0, "a", 0, samples[:2]), SampleGroup(1, "b", 0, samples[2:])]
    assert Held.of(groups) == Held(groups=2, samples=3, response_tokens=12)
    assert Held.of([]) == Held(groups=0, samples=0, response_tokens=0)
