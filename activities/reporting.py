"""The producer's ``errors/`` rows on their way to the tracker, while any activity of the run works.

The producer writes them to ``rollout_errors.jsonl`` itself. Nothing here may fail an activity: a
producer that does not answer is asked again, and trackers never raise.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from models.errors import ActorLost, ServiceUnreachable
from models.ids import RunRef
from models.ports import ProducerPort, ServingReport, Tracker

FORWARD_EVERY_S = 15.0
"""Time between questions; the producer makes a report in as much time."""

ASK_TIMEOUT_S = 5.0
"""Longest wait for an answer: the last question is asked when the activity's work is done."""

_log = structlog.get_logger(__name__)


class ReportForwarder:
    """Remembers for every run the last report that was forwarded; one in each worker process.

    Numbers start over with the producer's process. The last report is therefore asked for again: a
    producer that does not have it is another one, and what it reports is all new. A report that is
    not newer than the last one is never forwarded, so none is told twice by this process.
    """

    def __init__(self) -> None:
        self._last: dict[RunRef, ServingReport] = {}

    @asynccontextmanager
    async def flowing(
        self, run: RunRef, producer: ProducerPort, tracker: Tracker
    ) -> AsyncIterator[None]:
        """Forward every ``FORWARD_EVERY_S`` seconds while the block runs, and once at its end."""
        flowing = asyncio.create_task(self._forward_forever(run, producer, tracker))
        try:
            yield
        finally:
            flowing.cancel()
            await asyncio.gather(flowing, return_exceptions=True)
            await self.forward(run, producer, tracker)

    async def forward(self, run: RunRef, producer: ProducerPort, tracker: Tracker) -> None:
        """Tell ``tracker`` what is new. A producer that cannot be asked is left for later."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                reports = await self._new_reports(run, producer)
        except (ActorLost, ServiceUnreachable, TimeoutError) as error:
            _log.debug("serving reports unknown", run=run.run_id, reason=str(error))
            return
        for report in reports:
            tracker.log(run, report.metrics)
            self._last[run] = report

    async def _new_reports(self, run: RunRef, producer: ProducerPort) -> list[ServingReport]:
        last = self._last.get(run)
        if last is None:
            return list(await producer.reports(0))
        reports = await producer.reports(last.number - 1)
        if not reports or (reports[0].number, reports[0].time_unix) != (
            last.number,
            last.time_unix,
        ):
            reports = await producer.reports(0)
        return [report for report in reports if report.time_unix > last.time_unix]

    async def _forward_forever(self, run: RunRef, producer: ProducerPort, tracker: Tracker) -> None:
        while True:
            await asyncio.sleep(FORWARD_EVERY_S)
            await self.forward(run, producer, tracker)
