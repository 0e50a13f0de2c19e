"""Single flight: joined, remembered, ended by a newer epoch."""

import asyncio

import pytest

from activities.rollout.single_flight import SingleFlight
from models.errors import StaleFence
from models.ids import FenceToken


def token(epoch, update=0, attempt=1):
    return FenceToken(epoch=epoch, update=update, attempt=attempt)


class Stage:
    """Counts its starts and ends when told."""

    def __init__(self):
        self.starts = 0
        self.ended = 0
        self.go = asyncio.Event()

    async def __call__(self):
        self.starts += 1
        try:
            await self.go.wait()
        finally:
            self.ended += 1
        return self.starts


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_same_key_joins_and_is_remembered():
    flight, stage = SingleFlight[int]("collect"), Stage()
    calls = [asyncio.ensure_future(flight.run(token(1, 0, n), (0,), stage)) for n in (1, 2)]
    await settle()
    assert stage.starts == 1
    stage.go.set()
    assert await asyncio.gather(*calls) == [1, 1]
    assert await flight.run(token(1, 0, 3), (0,), stage) == 1
    assert stage.starts == 1


async def test_another_key_of_the_epoch_waits_its_turn():
    flight, first, second = SingleFlight[int]("collect"), Stage(), Stage()
    one = asyncio.ensure_future(flight.run(token(1, 0), (0,), first))
    await settle()
    two = asyncio.ensure_future(flight.run(token(1, 1), (1,), second))
    await settle()
    assert (first.starts, second.starts) == (1, 0)
    first.go.set()
    second.go.set()
    assert await asyncio.gather(one, two) == [1, 1]


async def test_a_newer_epoch_ends_the_older_stage_before_its_own_starts():
    flight, old, new = SingleFlight[int]("collect"), Stage(), Stage()
    stale = asyncio.ensure_future(flight.run(token(1), (0,), old))
    await settle()
    fresh = asyncio.ensure_future(flight.run(token(2), (0,), new))
    new.go.set()
    assert await fresh == 1
    assert old.ended == 1
    with pytest.raises(StaleFence, match="collect"):
        await stale
    with pytest.raises(StaleFence):
        await flight.run(token(1), (0,), old)


async def test_a_failed_stage_starts_again():
    flight = SingleFlight[int]("collect")

    async def failing():
        raise ValueError("broken")

    async def working():
        return 7

    with pytest.raises(ValueError, match="broken"):
        await flight.run(token(1), (0,), failing)
    assert await flight.run(token(1, 0, 2), (0,), working) == 7


async def test_a_cancelled_caller_leaves_the_stage():
    flight, stage = SingleFlight[int]("collect"), Stage()
    caller = asyncio.ensure_future(flight.run(token(1), (0,), stage))
    await settle()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    stage.go.set()
    assert await flight.run(token(1, 0, 2), (0,), stage) == 1
    assert stage.starts == 1


async def test_revoking_and_closing_end_the_stage():
    for end in ("revoke", "close"):
        flight, stage = SingleFlight[int]("collect"), Stage()
        caller = asyncio.ensure_future(flight.run(token(1), (0,), stage))
        await settle()
        if end == "revoke":
            flight.revoke(1)
        else:
            await flight.aclose()
        with pytest.raises(StaleFence, match="ended"):
            await caller
        assert stage.ended == 1


async def test_nothing_starts_once_it_is_closed():
    """Neither for who comes late nor for who waited behind another stage."""
    flight, first, second = SingleFlight[int]("collect"), Stage(), Stage()
    running = asyncio.ensure_future(flight.run(token(1), (0,), first))
    await settle()
    waiting = asyncio.ensure_future(flight.run(token(1), (1,), second))
    await settle()
    await flight.aclose()
    with pytest.raises(StaleFence, match="ended"):
        await running
    with pytest.raises(StaleFence, match=r"collect \(1,\): the component closed"):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(StaleFence, match="the component closed"):
        await flight.run(token(2), (2,), second)
    assert second.starts == 0
