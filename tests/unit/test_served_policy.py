"""Served versions and publication boundaries: what is legal, who waits, and for how long."""

import asyncio

import pytest

from activities.rollout.policy import ServedPolicy
from models.errors import ContractViolation, GenerationFault

DEADLINE_S = 5.0


def state(policy):
    return (policy.published, policy.publishing, policy.newest, policy.generation)


async def passes(policy):
    """Whether a call may go on at once."""
    try:
        await policy.released(0.0)
    except GenerationFault:
        return False
    return True


async def test_before_the_first_publication_no_version_is_legal():
    policy = ServedPolicy()
    assert state(policy) == (-1, None, -1, 0)
    assert await passes(policy)


async def test_a_publication():
    policy = ServedPolicy(3)
    policy.begin(4, holds=True)
    assert state(policy) == (3, 4, 4, 1)
    assert not await passes(policy)
    policy.end(4)
    assert state(policy) == (4, None, 4, 1)
    assert await passes(policy)


async def test_a_rolling_publication_holds_nobody():
    policy = ServedPolicy(3)
    policy.begin(4, holds=False)
    assert state(policy) == (3, 4, 4, 1)
    assert await passes(policy)


async def test_begin_and_end_may_be_repeated():
    policy = ServedPolicy(3)
    policy.begin(4, holds=True)
    policy.begin(4, holds=True)
    assert state(policy) == (3, 4, 4, 1)
    policy.end(4)
    policy.end(4)
    assert state(policy) == (4, None, 4, 1)


async def test_the_published_version_can_be_published_again():
    """As after an engine was replaced."""
    policy = ServedPolicy(4)
    policy.begin(4, holds=True)
    assert state(policy) == (4, 4, 4, 1)
    assert not await passes(policy)
    policy.end(4)
    assert state(policy) == (4, None, 4, 1)
    assert await passes(policy)


async def test_abandoning_lets_everybody_go_on_and_may_be_repeated():
    policy = ServedPolicy(3)
    policy.abandon()
    assert state(policy) == (3, None, 3, 0)
    policy.begin(4, holds=True)
    policy.abandon()
    policy.abandon()
    assert state(policy) == (3, None, 3, 1)
    assert await passes(policy)
    policy.begin(4, holds=True)
    assert state(policy) == (3, 4, 4, 2)
    policy.end(4)
    assert state(policy) == (4, None, 4, 2)


async def test_an_older_version_is_refused():
    policy = ServedPolicy(4)
    with pytest.raises(ContractViolation, match="version 3 begins, but 4 is published"):
        policy.begin(3, holds=True)
    assert state(policy) == (4, None, 4, 0)
    assert await passes(policy)


@pytest.mark.parametrize("version", [3, 5])
async def test_the_end_of_another_publication_is_refused(version):
    policy = ServedPolicy(3)
    policy.begin(4, holds=True)
    with pytest.raises(ContractViolation, match=f"version {version} ends, .* last is of 4"):
        policy.end(version)
    assert state(policy) == (3, 4, 4, 1)
    assert not await passes(policy)


async def test_an_end_without_a_beginning_is_refused():
    policy = ServedPolicy(3)
    with pytest.raises(ContractViolation, match="version 4 ends"):
        policy.end(4)
    policy.begin(4, holds=True)
    policy.abandon()
    with pytest.raises(ContractViolation, match="version 4 ends"):
        policy.end(4)


async def test_everybody_who_waits_is_released():
    policy = ServedPolicy(3)
    policy.begin(4, holds=True)
    waiting = [asyncio.create_task(policy.released(DEADLINE_S)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    policy.end(4)
    await asyncio.wait_for(asyncio.gather(*waiting), DEADLINE_S)


async def test_a_publication_that_begins_before_the_released_run_holds_them_as_well():
    policy = ServedPolicy(3)
    policy.begin(4, holds=True)
    waiting = asyncio.create_task(policy.released(DEADLINE_S))
    await asyncio.sleep(0)
    policy.end(4)
    policy.begin(5, holds=True)  # in the same turn of the loop: the waiter did not run in between
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    policy.end(5)
    await asyncio.wait_for(waiting, DEADLINE_S)


async def test_a_wait_ends_as_a_timeout_fault():
    policy = ServedPolicy(3)
    policy.begin(4, holds=True)
    with pytest.raises(GenerationFault, match=r"held this call back for 0\.01 s") as caught:
        await asyncio.wait_for(policy.released(0.01), DEADLINE_S)
    assert caught.value.category == "timeout"


async def test_a_cancelled_wait_is_no_fault():
    policy = ServedPolicy(3)
    policy.begin(4, holds=True)
    waiting = asyncio.create_task(policy.released(DEADLINE_S))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
