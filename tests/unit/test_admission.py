"""The admission gate: fair, closable, and exact in its count."""

import asyncio

import pytest

from activities.rollout.admission import AdmissionGate
from models.errors import ServiceUnreachable


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_permits_are_handed_over_in_order():
    gate, order = AdmissionGate(1), []

    async def call(name):
        await gate.acquire()
        order.append(name)

    await gate.acquire()
    callers = [asyncio.ensure_future(call(name)) for name in "abc"]
    await settle()
    assert (gate.active, gate.waiting, order) == (1, 3, [])
    for _ in range(3):
        gate.release()
        await settle()
    assert order == ["a", "b", "c"]
    assert (gate.active, gate.waiting) == (1, 0)
    await asyncio.gather(*callers)


async def test_closing_lets_active_calls_finish_and_keeps_the_waiters():
    gate = AdmissionGate(1)
    await gate.acquire()
    waiter = asyncio.ensure_future(gate.acquire())
    await settle()
    gate.pause()
    idle = asyncio.ensure_future(gate.wait_idle(5))
    await settle()
    assert not idle.done()
    gate.release()
    await idle
    assert (gate.active, gate.waiting, waiter.done()) == (0, 1, False)
    gate.resume()
    await asyncio.wait_for(waiter, 5)
    assert (gate.active, gate.waiting) == (1, 0)


async def test_closing_wins_against_a_permit_just_handed_over():
    gate, order = AdmissionGate(1), []

    async def call(name):
        await gate.acquire()
        order.append(name)
        gate.release()

    await gate.acquire()
    callers = [asyncio.ensure_future(call(name)) for name in "ab"]
    await settle()
    gate.release()  # a has the permit, but has not run yet
    gate.pause()
    await gate.wait_idle(5)
    assert (gate.active, gate.waiting, order) == (0, 2, [])
    gate.resume()
    await asyncio.wait_for(asyncio.gather(*callers), 5)
    assert order == ["a", "b"]  # a kept its place


async def test_a_cancelled_waiter_takes_no_permit():
    gate = AdmissionGate(1)
    await gate.acquire()
    first, second = (asyncio.ensure_future(gate.acquire()) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    gate.release()
    await asyncio.wait_for(second, 5)
    assert (gate.active, gate.waiting) == (1, 0)


async def test_a_waiter_cancelled_with_its_permit_in_hand_passes_it_on():
    gate = AdmissionGate(1)
    await gate.acquire()
    first, second = (asyncio.ensure_future(gate.acquire()) for _ in range(2))
    await settle()
    gate.release()
    first.cancel()
    await asyncio.wait_for(second, 5)
    assert gate.active == 1
    assert first.cancelled()


async def test_resizing_admits_more_and_never_interrupts():
    gate = AdmissionGate(1)
    waiters = [asyncio.ensure_future(gate.acquire()) for _ in range(3)]
    await settle()
    gate.resize(2)
    await settle()
    assert gate.active == 2
    gate.resize(1)
    gate.release()
    await settle()
    assert (gate.active, gate.waiting) == (1, 1)
    gate.release()
    await asyncio.wait_for(asyncio.gather(*waiters), 5)


async def test_the_wait_for_idle_has_a_deadline():
    gate = AdmissionGate(2)
    await gate.acquire()
    with pytest.raises(ServiceUnreachable, match="1 generation calls"):
        await gate.wait_idle(0.01)


async def test_a_release_without_a_permit_is_a_defect():
    with pytest.raises(RuntimeError):
        AdmissionGate(1).release()


async def test_an_abort_ends_waiters_callers_and_those_already_scored():
    gate, ended = AdmissionGate(2), []

    async def call(name, scoring):
        try:
            await gate.acquire()
            try:
                if not scoring:
                    await asyncio.Event().wait()
            finally:
                gate.release()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleaning up takes a turn of the loop
            ended.append(name)

    callers = [
        asyncio.ensure_future(call(name, name == "scoring"))
        for name in ("scoring", "calling", "calling too", "waiting")
    ]
    await settle()
    assert (gate.active, gate.waiting) == (2, 1)
    await gate.abort(5)
    assert sorted(ended) == ["calling", "calling too", "scoring", "waiting"]
    assert all(caller.cancelled() for caller in callers)
    assert (gate.active, gate.waiting) == (0, 0)
    with pytest.raises(RuntimeError, match="aborted"):
        gate.resume()
    later = asyncio.ensure_future(gate.acquire())
    await asyncio.wait({later}, timeout=5)
    assert later.cancelled()
    assert gate.active == 0


async def test_an_abort_leaves_alone_what_has_ended_and_has_a_deadline():
    gate = AdmissionGate(4)

    async def call():
        await gate.acquire()
        gate.release()

    for _ in range(3):
        await asyncio.ensure_future(call())

    release = asyncio.Event()

    async def stubborn():
        await gate.acquire()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        gate.release()

    task = asyncio.ensure_future(stubborn())
    await settle()
    with pytest.raises(ServiceUnreachable, match="1 cancelled calls"):
        await gate.abort(0.01)
    release.set()
    await asyncio.wait_for(task, 5)
    await gate.abort(5)


async def test_a_permit_just_handed_over_is_given_back_on_an_abort():
    gate = AdmissionGate(1)
    await gate.acquire()
    waiter = asyncio.ensure_future(gate.acquire())
    await settle()
    gate.release()  # the waiter has the permit, but has not run yet
    await gate.abort(5)
    assert waiter.cancelled()
    assert (gate.active, gate.waiting) == (0, 0)
