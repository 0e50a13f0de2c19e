"""A rolling publication: one engine after the other, in rank order, while the others serve on.

Each engine is given no new group, finishes what it has, loads, is verified and serves again; until
the last one has, both the old and the new weights may be routed to. An engine that does not drain,
load or show the new weights in time is taken out of the table for good and replaced.
"""

import asyncio
import time
from contextlib import aclosing

from activities.fleet_update import Updated, lost, replace_failed
from activities.loading import EngineUpdate, LoadOrder, Phase
from activities.publication_trace import PublicationTrace
from activities.rolling_plan import RollingPlan
from activities.site import RouterControl, Site, store_of
from activities.storage import layout
from models.errors import ContractViolation, EngineLost, ServiceUnreachable
from models.ports import EngineHandle
from models.publication import EngineConfirmation, EngineFailure
from models.routing import EngineState, RouterState

DRAIN = "drain"


class RollingEvents:
    """``engine_drain.jsonl``: what a rolling publication did, event by event."""

    def __init__(self, order: LoadOrder) -> None:
        self._store = store_of(order.run)
        self._version = order.weights.version

    async def note(self, event: str, **details: str | int) -> None:
        """Append ``event`` with wall-clock and monotonic time, in seconds."""
        row = {
            "event": event,
            "time": time.time(),
            "monotonic": time.monotonic(),
            "version": self._version,
            **details,
        }
        await asyncio.to_thread(self._store.append_jsonl, layout.ROLLING_PUBLICATION, row)


class RollingUpdate:
    """One rolling publication. Used once.

    An update that was cut off is continued by another one: engines that hold the new weights are
    only opened, an engine that was draining drains again.
    """

    def __init__(
        self,
        site: Site,
        order: LoadOrder,
        router: RouterControl,
        drain_timeout_s: float,
        trace: PublicationTrace,
    ) -> None:
        self._site, self._order, self._router, self._trace = site, order, router, trace
        self._drain_timeout_s = drain_timeout_s
        self._events = RollingEvents(order)
        self._plan = RollingPlan((), (), (order.weights.version, order.weights.digest))
        self._served: dict[str, EngineHandle] = {}
        self._confirmations: list[EngineConfirmation] = []
        self._failures: list[EngineFailure] = []
        self._repeated = True

    async def run(self, routed: RouterState) -> Updated:
        """Bring every live engine to the order's weights, from what the router routes to now.

        Raises:
            EngineLost: there is no engine, or a replacement did not answer either.
            ContractViolation: a replacement refused, or serves other bytes than were exported.
            ServiceUnreachable: the router did not answer.
            StaleFence: another epoch owns the run's root or the router.
        """
        live = await self._site.fleet.engines(self._order.run)
        if not live:
            raise EngineLost(f"run {self._order.run.run_id} has no live engine to publish to")
        rows = [status.engine for status in routed.engines]
        self._plan = RollingPlan.begin(live, rows, self._order.weights)
        await self._set_table()
        for engine in live:
            await self._renew(engine.name)
        return Updated(
            engines=tuple(self._served.values()),
            confirmations=tuple(self._confirmations),
            repeated=self._repeated,
            replaced=tuple(self._failures),
        )

    async def _renew(self, name: str) -> None:
        """Bring the engine, or else the one that replaces it, to serve the new weights."""
        error = await self._updated(name)
        if error is None:
            return
        await replace_failed(self._site, self._order, self._failures[-1:], self._trace)
        error = await self._updated(name)
        if error is not None:
            raise lost(self._order, error)

    async def _updated(self, name: str) -> ContractViolation | ServiceUnreachable | None:
        """Drain, load and open the engine; what it failed with, None when it serves."""
        engine = await self._standing(name)
        row = self._plan.row(name)
        if engine is None or row.state is EngineState.UNAVAILABLE:
            gone = ServiceUnreachable(f"{name} does not run, or the router gave it up")
            await self._give_up(name, DRAIN, gone)
            return gone
        if self._plan.must_drain(name):
            error = await self._drain(name)
            if error is not None:
                await self._give_up(name, DRAIN, error)
                return error
        await self._enter_update(name)
        async with aclosing(EngineUpdate(self._site, self._order, engine)) as update:
            for phase in Phase:
                with self._trace.part(phase.value, engine=name):
                    await update.attempt(phase)
                if update.error is not None:
                    await self._give_up(name, phase.value, update.error)
                    return update.error
            await self._reopen(update)
        return None

    async def _standing(self, name: str) -> EngineHandle | None:
        """The live engine of that name, put into the plan if it is another one than before."""
        live = await self._site.fleet.engines(self._order.run)
        engine = next((each for each in live if each.name == name), None)
        row = self._plan.row(name)
        if engine is None or (engine.incarnation, engine.url) == (row.incarnation, row.url):
            return engine
        if row.state is not EngineState.UNAVAILABLE:
            self._plan = self._plan.moved(name, EngineState.UNAVAILABLE)
        self._plan = self._plan.replaced(engine)
        return engine

    async def _drain(self, name: str) -> ServiceUnreachable | None:
        await self._events.note("drain_started", engine=name)
        if self._plan.row(name).state is EngineState.SERVING:
            self._plan = self._plan.moved(name, EngineState.DRAINING)
        try:
            with self._trace.part(DRAIN, engine=name):
                await self._router.drain(self._order.token, name, self._drain_timeout_s)
        except ServiceUnreachable as error:
            return error
        await self._events.note("drain_finished", engine=name)
        return None

    async def _enter_update(self, name: str) -> None:
        """The engine owes nothing; from now on it is not routable whatever happens here."""
        if self._plan.row(name).state is EngineState.SERVING:
            self._plan = self._plan.moved(name, EngineState.DRAINING)
        if self._plan.row(name).state is EngineState.DRAINING:
            self._plan = self._plan.moved(name, EngineState.UPDATING)
        await self._set_table()
        await self._events.note("update_started", engine=name)

    async def _reopen(self, update: EngineUpdate) -> None:
        name = update.engine.name
        await self._events.note("update_finished", engine=name)
        self._plan = self._plan.moved(name, EngineState.SERVING)
        await self._set_table()
        await self._events.note("engine_reopened", engine=name)
        self._served[name] = update.engine
        self._confirmations.append(update.confirmation)
        self._repeated = self._repeated and update.repeated

    async def _give_up(
        self, name: str, phase: str, error: ContractViolation | ServiceUnreachable
    ) -> None:
        """Take the engine out of the table for good."""
        row = self._plan.row(name)
        if row.state is not EngineState.UNAVAILABLE:
            self._plan = self._plan.moved(name, EngineState.UNAVAILABLE)
        await self._set_table()
        self._failures.append(
            EngineFailure(
                engine=name, incarnation=row.incarnation, phase=phase, error=error.message
            )
        )
        await self._events.note("engine_unavailable", engine=name, phase=phase, error=error.message)

    async def _set_table(self) -> None:
        await self._router.set_table(self._order.token, self._plan.table)
