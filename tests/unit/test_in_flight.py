"""Running attempts: what they owe, and that every one of them ends."""

import asyncio

import pytest

from activities.rollout import in_flight as module
from activities.rollout.in_flight import InFlight
from models.errors import ServiceUnreachable
from models.prompt import PromptDraw


def draw(index):
    return PromptDraw(
        group_index=index, first_sample_index=4 * index, epoch_id=0, row=0, prepared_sample_id="p"
    )


class Attempts:
    """Attempts that end when told; a stubborn one ignores its cancellation until then."""

    def __init__(self, stubborn=()):
        self.ends, self.on_sample, self.changes, self.aborts = {}, {}, 0, 0
        self.stubborn = stubborn
        self.running = InFlight(self.start, 4, self.changed)

    def changed(self):
        self.changes += 1

    async def start(self, drawn, on_sample):
        index = drawn.group_index
        self.on_sample[index] = on_sample
        self.ends[index] = asyncio.Event()
        while not self.ends[index].is_set():
            try:
                await self.ends[index].wait()
            except asyncio.CancelledError:
                if index not in self.stubborn:
                    raise
        return index

    async def abort_all(self):
        self.aborts += 1
        for index in self.stubborn:
            self.ends[index].set()

    async def submit(self, *indices):
        for index in indices:
            self.running.submit(draw(index))
        await asyncio.sleep(0)


async def test_samples_and_groups_are_counted_as_they_end():
    made = Attempts()
    await made.submit(3, 1)
    assert (made.running.groups, made.running.unfinished_samples) == (2, 8)
    made.on_sample[3]()
    made.on_sample[3]()
    assert (made.running.unfinished_samples, made.running.scored_samples) == (6, 2)
    assert made.changes == 2
    for index in (3, 1):
        made.ends[index].set()
    while made.running.groups:
        await asyncio.sleep(0)
    assert made.running.unfinished_samples == 0
    assert [each.draw.group_index for each in made.running.take_ended()] == [1, 3]
    assert made.running.take_ended() == []


async def test_cancelled_attempts_are_joined():
    made = Attempts()
    await made.submit(0, 1, 2)
    made.running.cancel()
    await made.running.join(made.abort_all)
    assert made.aborts == 0
    ended = made.running.take_ended()
    assert [each.draw.group_index for each in ended] == [0, 1, 2]
    assert all(each.task.cancelled() for each in ended)
    assert (made.running.groups, made.running.unfinished_samples) == (0, 0)


async def test_a_second_cancellation_does_not_interrupt_the_first():
    made = Attempts(stubborn=(0,))
    await made.submit(0)
    made.running.cancel()
    await asyncio.sleep(0)
    (task,) = made.running._running
    made.running.cancel()
    assert task.cancelling() == 1
    await made.abort_all()
    await made.running.join(made.abort_all)


async def test_engines_are_told_once_to_abort_what_does_not_end(monkeypatch):
    monkeypatch.setattr(module, "JOIN_S", 0.02)
    made = Attempts(stubborn=(1,))
    await made.submit(0, 1)
    made.running.cancel()
    await made.running.join(made.abort_all)
    assert made.aborts == 1
    assert len(made.running.take_ended()) == 2


async def test_what_never_ends_is_told(monkeypatch):
    monkeypatch.setattr(module, "JOIN_S", 0.02)
    monkeypatch.setattr(module, "ABORT_JOIN_S", 0.02)
    made = Attempts(stubborn=(1,))
    await made.submit(0, 1)

    async def in_vain():
        made.aborts += 1

    made.running.cancel()
    with pytest.raises(ServiceUnreachable, match="1 cancelled group attempts still run"):
        await made.running.join(in_vain)
    assert made.aborts == 1
    await made.abort_all()
    await made.running.join(in_vain)  # asked again later, it has ended
    assert len(made.running.take_ended()) == 2


def test_the_deadlines_are_the_documented_ones():
    assert (module.JOIN_S, module.ABORT_JOIN_S) == (30.0, 180.0)
