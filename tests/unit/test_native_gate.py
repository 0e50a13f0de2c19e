"""The gate in front of the engine's scheduler."""

import asyncio

import pytest

from workers.engines.native.answers import PayloadError
from workers.engines.native.gate import Gate

DEADLINE_S = 20


async def held(gate: Gate, *rids: str) -> "list[asyncio.Task[None]]":
    """Requests that wait in front of a closed gate."""
    tasks = [asyncio.create_task(gate.enter(rid)) for rid in rids]
    while gate.num_held < len(rids):
        await asyncio.sleep(0)
    return tasks


async def outcome(task: "asyncio.Task[None]") -> int | None:
    """Status of the refusal; None when the request went through."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            await task
    except PayloadError as error:
        return error.status
    return None


async def test_an_abort_is_told_when_the_gate_opens() -> None:
    gate = Gate()
    gate.pause()
    first, second = await held(gate, "ab1", "x")
    gate.abort("ab")
    await asyncio.sleep(0)
    assert not first.done()
    gate.resume()
    assert [await outcome(first), await outcome(second)] == [499, None]
    assert (gate.num_held, gate.num_inside) == (0, 1)
    gate.pause()
    (same_id,) = await held(gate, "ab1")
    gate.resume()
    assert await outcome(same_id) is None


async def test_shutdown_refuses_at_once() -> None:
    gate = Gate()
    gate.pause()
    tasks = await held(gate, "a", "b")
    gate.refuse_all()
    assert [await outcome(task) for task in tasks] == [499, 499]
    assert gate.num_held == 0


async def test_a_held_request_whose_client_left_is_forgotten() -> None:
    gate = Gate()
    gate.pause()
    (task,) = await held(gate, "a")
    gate.abort(None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (again,) = await held(gate, "a")
    gate.resume()
    assert await outcome(again) is None


async def test_an_update_holds_new_requests_until_those_inside_left() -> None:
    gate = Gate()
    await gate.enter("inside")
    entered = asyncio.Event()

    async def update() -> None:
        async with gate.update():
            entered.set()
            await asyncio.sleep(0)

    updating = asyncio.create_task(update())
    (late,) = await held(gate, "late")
    assert not entered.is_set()
    gate.leave()
    async with asyncio.timeout(DEADLINE_S):
        await updating
    assert await outcome(late) is None
