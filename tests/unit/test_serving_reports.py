"""Serving reports on their way to the tracker: each once, whatever process the producer is."""

import asyncio
from pathlib import Path

import pytest

from activities import serving_reports
from activities.serving_reports import relay, relaying
from activities.site import Site
from models.errors import ProducerLost, ServingFailureSustained
from models.ids import FenceToken, RunRef
from models.ports import ServingReport
from models.run import PrepareRequest
from tests.support.fake_fleet import FakeFleet, ListTracker, site_of

DEADLINE_S = 10.0


def report(number: int, time_unix: float | None = None, fatal: int = 0) -> ServingReport:
    at = float(number) if time_unix is None else time_unix
    metrics = {"errors/elapsed_seconds": at, "errors/fatal": float(fatal)}
    return ServingReport(number=number, time_unix=at, metrics=metrics)


class Rig:
    def __init__(self, run: RunRef) -> None:
        self.run = run
        self.fleet = FakeFleet()
        self.tracker = ListTracker()
        self.site: Site = site_of(self.fleet, self.tracker)

    @property
    def reports(self) -> list[ServingReport]:
        return self.fleet.live_producer.serving_reports

    @property
    def seen(self) -> list[float]:
        return [row["errors/elapsed_seconds"] for row in self.tracker.rows]


@pytest.fixture
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    name = f"train/{request.node.name}"
    made = Rig(RunRef(run_id=name, root=str(tmp_path), spec_sha256="0" * 64))
    token = FenceToken(epoch=1, update=0, attempt=0)
    await made.fleet.prepare(token, PrepareRequest(run=made.run, epoch=1))
    return made


async def test_every_report_is_relayed_once(rig: Rig) -> None:
    assert await relay(rig.site, rig.run) == 0
    rig.reports.extend([report(1), report(2)])
    assert await relay(rig.site, rig.run) == 2
    assert await relay(rig.site, rig.run) == 0
    rig.reports.append(report(3))
    assert await relay(rig.site, rig.run) == 1
    assert rig.seen == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("count", [1, 3, 5])
async def test_a_new_process_counts_anew_and_none_is_missed(rig: Rig, count: int) -> None:
    rig.reports.extend([report(1), report(2), report(3)])
    await relay(rig.site, rig.run)
    rig.reports[:] = [report(number, 100.0 + number) for number in range(1, count + 1)]
    assert await relay(rig.site, rig.run) == count
    assert rig.seen[3:] == [100.0 + number for number in range(1, count + 1)]


async def test_reports_that_live_producer_forgot_are_no_hindrance(rig: Rig) -> None:
    rig.reports.extend([report(1), report(2)])
    await relay(rig.site, rig.run)
    rig.reports[:] = [report(7), report(8)]
    await relay(rig.site, rig.run)
    assert rig.seen == [1.0, 2.0, 7.0, 8.0]


async def test_a_dead_producer_fails_nobody(rig: Rig) -> None:
    rig.fleet.live_producer.alive = False
    assert await relay(rig.site, rig.run) == 0
    async with relaying(rig.site, rig.run):
        pass
    assert rig.seen == []


async def test_a_short_stage_relays_too(rig: Rig) -> None:
    rig.reports.append(report(1))
    async with asyncio.timeout(DEADLINE_S), relaying(rig.site, rig.run):
        pass
    assert rig.seen == [1.0]


async def test_stages_in_quick_succession_ask_once(rig: Rig) -> None:
    rig.reports.append(report(1))
    async with asyncio.timeout(DEADLINE_S):
        async with relaying(rig.site, rig.run):
            pass
        rig.reports.append(report(2))
        async with relaying(rig.site, rig.run):
            pass
    assert rig.seen == [1.0]


async def test_the_last_report_of_a_failing_stage_arrives(rig: Rig) -> None:
    rig.reports.append(report(1))

    async def fail() -> None:
        async with relaying(rig.site, rig.run):
            rig.reports.append(report(2, fatal=1))
            raise ServingFailureSustained("half of all attempts failed")

    async with asyncio.timeout(DEADLINE_S):
        async with relaying(rig.site, rig.run):
            pass
        with pytest.raises(ServingFailureSustained):
            await fail()
    assert rig.seen == [1.0, 2.0]
    assert rig.tracker.rows[-1]["errors/fatal"] == 1.0


async def test_a_long_stage_relays_again_and_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_reports, "INTERVAL_S", 0.001)
    rig.reports.append(report(1))
    arrived = asyncio.Event()
    log = rig.tracker.log

    def count(run: RunRef, metrics: dict[str, float]) -> None:
        log(run, metrics)
        if len(rig.reports) < 3:
            rig.reports.append(report(len(rig.reports) + 1))
        else:
            arrived.set()

    monkeypatch.setattr(rig.tracker, "log", count)
    async with asyncio.timeout(DEADLINE_S), relaying(rig.site, rig.run):
        await arrived.wait()
    assert rig.seen == [1.0, 2.0, 3.0]


async def test_a_hanging_producer_holds_a_stage_up_for_its_limit_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_reports, "JOIN_S", 0.01)
    asked = asyncio.Event()

    async def hang(after: int) -> tuple[ServingReport, ...]:
        asked.set()
        await asyncio.Event().wait()
        raise ProducerLost("never")

    monkeypatch.setattr(rig.fleet.live_producer, "reports", hang)
    async with asyncio.timeout(DEADLINE_S), relaying(rig.site, rig.run):
        await asked.wait()
    assert rig.seen == []
