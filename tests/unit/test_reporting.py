"""Serving reports reach the tracker once each, across producers that come and go."""

import asyncio
from typing import Any

import pytest

from activities import reporting
from activities.reporting import ReportForwarder
from models.errors import ProducerLost, ServiceUnreachable
from models.ids import RunRef
from models.ports import ServingReport
from tests.support.fake_fleet import ListTracker

RUN = RunRef(run_id="train/x", root="/nowhere", spec_sha256="0" * 64)


class Reports:
    """A producer of which only the reports matter; it keeps the newest ``keeps``."""

    def __init__(self, keeps: int = 300) -> None:
        self.made: list[ServingReport] = []
        self.keeps = keeps
        self.error: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()

    def make(self, *times: float) -> None:
        for time_unix in times:
            metrics = {"errors/elapsed_seconds": time_unix}
            number = len(self.made) + 1
            self.made.append(ServingReport(number=number, time_unix=time_unix, metrics=metrics))

    async def reports(self, after: int) -> tuple[ServingReport, ...]:
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return tuple(each for each in self.made[-self.keeps :] if each.number > after)


def as_port(producer: Reports) -> Any:
    """For arguments of the whole port's type."""
    return producer


class Desk:
    """A forwarder with its tracker."""

    def __init__(self) -> None:
        self.forwarder, self.tracker = ReportForwarder(), ListTracker()

    async def forward(self, producer: Reports) -> list[float]:
        """What reaches the tracker now."""
        before = len(self.tracker.rows)
        await self.forwarder.forward(RUN, as_port(producer), self.tracker)
        return [row["errors/elapsed_seconds"] for row in self.tracker.rows[before:]]


async def test_each_report_is_told_once() -> None:
    desk, producer = Desk(), Reports()
    assert await desk.forward(producer) == []
    producer.make(10, 25)
    assert await desk.forward(producer) == [10, 25]
    assert await desk.forward(producer) == []
    producer.make(40)
    assert await desk.forward(producer) == [40]


@pytest.mark.parametrize("made", [1, 2, 3, 5])
async def test_a_new_producer_starts_over_with_its_numbers(made: int) -> None:
    desk, producer = Desk(), Reports()
    producer.make(10, 25, 40)
    await desk.forward(producer)
    again = Reports()
    times = [100.0 + 15 * number for number in range(made)]
    again.make(*times)
    assert await desk.forward(again) == times
    assert await desk.forward(again) == []


async def test_what_the_producer_has_forgotten_is_not_missed() -> None:
    desk, producer = Desk(), Reports(keeps=2)
    producer.make(1)
    await desk.forward(producer)
    producer.make(2, 3, 4, 5)
    assert await desk.forward(producer) == [4, 5]


@pytest.mark.parametrize("error", [ProducerLost("gone"), ServiceUnreachable("silence")])
async def test_a_producer_that_cannot_be_asked_is_asked_again(error: Exception) -> None:
    desk, producer = Desk(), Reports()
    producer.make(10)
    producer.error = error
    assert await desk.forward(producer) == []
    producer.error = None
    assert await desk.forward(producer) == [10]


async def test_a_silent_producer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "ASK_TIMEOUT_S", 0.05)
    desk, producer = Desk(), Reports()
    producer.answers.clear()
    async with asyncio.timeout(5):
        assert await desk.forward(producer) == []


async def test_rows_flow_while_an_activity_runs_and_once_more_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reporting, "FORWARD_EVERY_S", 0.02)
    desk, producer = Desk(), Reports()

    async def failing_activity() -> None:
        async with desk.forwarder.flowing(RUN, as_port(producer), desk.tracker):
            producer.make(10)
            async with asyncio.timeout(5):
                while not desk.tracker.rows:
                    await asyncio.sleep(0.01)
            producer.make(25)
            raise ProducerLost("the activity's own error stays")

    with pytest.raises(ProducerLost, match="own error"):
        await failing_activity()
    assert [row["errors/elapsed_seconds"] for row in desk.tracker.rows] == [10, 25]
