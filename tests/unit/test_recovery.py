"""The stop rule on an injected clock, and sibling joining."""

import asyncio

import pytest

from activities.rollout.recovery import ServingHealth, join_siblings
from models.errors import ContractViolation, GenerationFault, ServingFailureSustained
from models.metrics import is_declared


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def health(clock):
    return ServingHealth(clock)


def test_half_failing_for_five_minutes_stops(clock, health):
    for second in range(300):
        clock.now = float(second)
        health.record(successes=1, faults=["transport"])
        health.check()
    clock.now = 300.0
    health.record(successes=1, faults=["transport"])
    with pytest.raises(ServingFailureSustained, match="300 of the last 600 group attempts"):
        health.check()
    metrics = health.metrics()
    assert metrics["errors/failure_fraction_5m"] == 0.5
    assert metrics["errors/window_group_attempts"] == 600  # 300 buckets of two attempts
    assert metrics["errors/high_failure_seconds"] == 300.0


def test_a_third_failing_never_stops(clock, health):
    for second in range(900):
        clock.now = float(second)
        health.record(successes=2, faults=["overload"])
        health.check()
    metrics = health.metrics()
    assert metrics["errors/high_failure_seconds"] == 0.0
    assert metrics["errors/requeued_groups"] == 900
    assert metrics["errors/completed_group_attempts"] == 2700
    assert metrics["errors/overload_groups"] == 900


def test_a_burst_then_silence_resets(clock, health):
    health.record(faults=["transport"] * 1000)
    health.check()
    clock.now = 299.0
    health.check()
    assert health.metrics()["errors/high_failure_seconds"] == 299.0
    clock.now = 300.0
    health.check()
    metrics = health.metrics()
    assert metrics["errors/window_group_attempts"] == 0
    assert metrics["errors/failure_fraction_5m"] == 0.0
    assert metrics["errors/high_failure_seconds"] == 0.0
    assert metrics["errors/requeued_groups"] == 1000


def test_recovery_resets_the_timer(clock, health):
    health.record(faults=["timeout"])
    health.check()
    clock.now = 250.0
    health.record(successes=2)
    health.check()
    assert health.metrics()["errors/high_failure_seconds"] == 0.0
    clock.now = 260.0
    health.record(faults=["timeout"] * 5)
    health.check()
    clock.now = 310.0
    health.check()
    assert health.metrics()["errors/high_failure_seconds"] == 50.0


def test_one_failure_a_minute_and_nothing_else_stops(clock, health):
    for second in range(60, 360):
        clock.now = float(second)
        if second % 60 == 0:
            health.record(faults=["unavailable"])
        health.check()
    clock.now = 360.0
    health.record(faults=["unavailable"])
    with pytest.raises(ServingFailureSustained, match="'unavailable': 6"):
        health.check()
    assert health.metrics()["errors/requeued_groups"] == 6


def test_idle_is_healthy(clock, health):
    clock.now = 3600.0
    health.check()
    metrics = health.metrics()
    assert metrics["errors/completed_group_attempts"] == 0
    assert metrics["errors/window_group_attempts"] == 0
    assert metrics["errors/failure_fraction_5m"] == 0.0
    assert metrics["errors/elapsed_seconds"] == 3600.0


def test_the_window_holds_300_seconds_however_long_it_runs(clock, health):
    for tick in range(4000):
        clock.now = tick / 2
        health.record(successes=1)
        health.check()
        assert len(health._buckets) <= 300
    assert health.metrics()["errors/window_group_attempts"] == 600
    assert health.metrics()["errors/completed_group_attempts"] == 4000


@pytest.mark.parametrize(("failed", "stops"), [(50, True), (49, False)])
def test_exactly_half_counts_as_failing_for_exactly_five_minutes(clock, health, failed, stops):
    health.record(successes=100 - failed, faults=["transport"] * failed)
    health.check()
    for second in range(1, 300):
        clock.now = float(second)
        health.record(successes=100 - failed, faults=["transport"] * failed)
        health.check()  # 299 s are not enough
    clock.now = 300.0
    if stops:
        with pytest.raises(ServingFailureSustained):
            health.check()
    else:
        health.check()


def test_every_metric_is_declared(health):
    assert all(is_declared(name) for name in health.metrics())


def test_submissions_pause_for_a_second_after_a_fault_only(clock, health):
    health.record(successes=1)
    assert health.submission_delay_s == 0.0
    clock.now = 5.0
    health.record(faults=["transport"])
    assert health.submission_delay_s == 1.0
    clock.now = 5.75
    assert health.submission_delay_s == 0.25
    clock.now = 6.0
    assert health.submission_delay_s == 0.0


def test_an_unknown_category_is_refused(health):
    with pytest.raises(ContractViolation, match="bad luck"):
        health.record(faults=["bad luck"])


async def test_siblings_return_in_order():
    async def later(value, turns):
        for _ in range(turns):
            await asyncio.sleep(0)
        return value

    assert await join_siblings(later(value, 5 - value) for value in range(4)) == [0, 1, 2, 3]


async def test_the_first_exception_cancels_and_joins_siblings():
    ended = []

    async def sibling():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleaning up takes a turn of the loop
            ended.append(True)

    async def failing():
        raise GenerationFault("gone", "transport")

    with pytest.raises(GenerationFault, match="gone"):
        await join_siblings([sibling(), failing(), sibling()])
    assert ended == [True, True]


async def test_an_unknown_error_is_not_hidden_by_a_known_fault():
    async def known():
        raise GenerationFault("gone", "transport")

    async def unknown():
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        await join_siblings([known(), unknown(), known()])


async def test_cancelling_the_group_joins_every_sibling():
    ended = []

    async def sibling():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    group = asyncio.ensure_future(join_siblings([sibling(), sibling()]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await group
    assert ended == [True, True]
