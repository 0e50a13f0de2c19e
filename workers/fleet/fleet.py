"""``RayFleet``: the GPU plane as activities see it. One in each GPU worker process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import structlog

from activities.storage.lease import require_epoch
from activities.wire.client import EngineClient
from models.errors import PerdureError
from models.ids import FenceToken, RunRef
from models.ports import ActorStatus, EngineHandle, RouterHandle
from models.run import PrepareReport, PrepareRequest
from workers.fleet import ending
from workers.fleet.caches import publish_caches
from workers.fleet.cluster import RayCluster
from workers.fleet.deaths import Deaths
from workers.fleet.engines import Engines, together
from workers.fleet.preparing import prepare
from workers.fleet.remote_ports import RemoteProducer, RemoteTrainer
from workers.fleet.router import Router
from workers.fleet.run_fleet import Cause, RunFleet

GIVEN_UP = Cause("EngineLost", "given up: it did not take weights, give memory back, or answer")

_log = structlog.get_logger(__name__)


class _Run(NamedTuple):
    fleet: RunFleet
    deaths: Deaths
    engines: Engines
    router: Router


class RayFleet:
    """Implements ``models.ports.FleetPort`` with Ray. Holds caches only.

    A run's actors are detached and named in the namespace of its id, so another worker, or this
    one after a restart, finds them again. Belongs to one event loop and never blocks it.
    """

    def __init__(
        self,
        address: str | None = None,
        connect: Callable[[str], EngineClient] = EngineClient,
    ) -> None:
        """``address``: host:port, default ``RAY_ADDRESS``; ``connect`` makes engine clients."""
        self._cluster = RayCluster(address)
        self._connect = connect
        self._runs: dict[RunRef, _Run] = {}

    async def join(self) -> None:
        """Connect to the cluster now, not at the first call; raises ``ServiceUnreachable``."""
        await self._cluster.join()

    async def close(self) -> None:
        """Drop caches and leave the cluster; the actors of every run go on."""
        for run in self._runs.values():
            await run.engines.close()
        self._runs.clear()
        await self._cluster.leave()

    async def prepare(self, token: FenceToken, request: PrepareRequest) -> PrepareReport:
        """See ``FleetPort.prepare``."""
        run = self._run(request.run)
        async with run.fleet.lock:
            return await prepare(run.fleet, run.engines, run.router, token, request)

    def trainer(self, run: RunRef) -> RemoteTrainer:
        """See ``FleetPort.trainer``."""
        return RemoteTrainer(self._run(run).fleet.actor("trainer"))

    def producer(self, run: RunRef) -> RemoteProducer:
        """See ``FleetPort.producer``."""
        return RemoteProducer(self._run(run).fleet.actor("producer"))

    async def engines(self, run: RunRef) -> tuple[EngineHandle, ...]:
        """See ``FleetPort.engines``."""
        return await self._run(run).engines.live()

    async def router(self, run: RunRef) -> RouterHandle | None:
        """See ``FleetPort.router``."""
        return await self._run(run).router.live()

    async def replace_engines(self, token: FenceToken, run: RunRef, names: tuple[str, ...]) -> None:
        """See ``FleetPort.replace_engines``.

        Raises:
            StaleFence: the token's epoch does not own the run's root any more.
        """
        fleet = self._run(run).fleet
        async with fleet.lock:
            await asyncio.to_thread(require_epoch, fleet.store, token.epoch)
            await asyncio.gather(*(ending.end_actor(fleet, name, GIVEN_UP) for name in names))

    async def ensure_engines(self, token: FenceToken, run: RunRef) -> tuple[EngineHandle, ...]:
        """See ``FleetPort.ensure_engines``. Raises as ``heal_engines``."""
        fleet, _, engines, router = self._run(run)
        async with fleet.lock:
            await asyncio.to_thread(require_epoch, fleet.store, token.epoch)
            _, ensured = await together((router.ensure(), engines.ensure()))
            return ensured.live

    async def heal_engines(self, token: FenceToken, run: RunRef) -> tuple[EngineHandle, ...]:
        """See ``FleetPort.heal_engines``.

        Raises:
            StaleFence: the token's epoch does not own the run's root any more.
            EngineLost: a replacement did not start.
        """
        fleet, _, engines, router = self._run(run)
        async with fleet.lock:
            await asyncio.to_thread(require_epoch, fleet.store, token.epoch)
            _, ensured, weights = await together(
                (router.ensure(), engines.ensure(), self.trainer(run).exported())
            )
            if weights is None:
                return ensured.fresh
            return await engines.stale(weights, ensured.live)

    @asynccontextmanager
    async def engine_deaths(self, run: RunRef) -> AsyncIterator[AsyncIterator[str]]:
        """See ``FleetPort.engine_deaths``."""
        fleet, deaths, _, router = self._run(run)
        servers = [("engine", rank) for rank in range((await fleet.spec()).inference.num_engines)]
        if await router.wanted():
            servers.append(("router", 0))
        async with deaths.told(servers) as names:
            yield names

    async def revoke(self, run: RunRef, epoch: int) -> None:
        """See ``FleetPort.revoke``."""
        await ending.revoke(self._run(run).fleet, epoch)

    async def publish_caches(self, run: RunRef) -> None:
        """See ``FleetPort.publish_caches``."""
        fleet = self._run(run).fleet
        async with fleet.lock:
            await publish_caches(fleet)

    async def teardown(self, run: RunRef) -> None:
        """See ``FleetPort.teardown``."""
        found = self._run(run)
        async with found.fleet.lock:
            await ending.teardown(found.fleet, found.engines)
        self._runs.pop(run, None)

    async def status(self, run: RunRef) -> tuple[ActorStatus, ...]:
        """See ``FleetPort.status``: live facts where an actor answers, else its last ones."""
        fleet = self._run(run).fleet
        rows = await fleet.rows()
        found = await asyncio.gather(*(fleet.facts(row.role, row.rank) for row in rows))
        return tuple(
            row.model_copy(update={"alive": False})
            if facts is None
            else facts.status.model_copy(update={"alive": facts.serving})
            for row, facts in zip(rows, found, strict=True)
        )

    async def reap(self, is_open: ending.IsOpen) -> tuple[str, ...]:
        """Tear down the fleet of every run that ``is_open`` (run id) denies; return their ids."""
        reaped = []
        for run_id in sorted(await ending.runs_with_actors(self._cluster)):
            if await is_open(run_id):
                continue
            try:
                if await self._reap(run_id, is_open):
                    reaped.append(run_id)
            except (PerdureError, OSError, ValueError) as error:
                # One root that cannot be written must not keep other fleets alive.
                _log.warning("fleet of an ended run left over", run=run_id, reason=str(error))
        return tuple(reaped)

    async def _reap(self, run_id: str, is_open: ending.IsOpen) -> bool:
        run = await ending.find_run(self._cluster, run_id)
        if run is None:
            await ending.kill_namespace(self._cluster, run_id)
            return True
        found = self._run(run)
        async with found.fleet.lock:
            # Started again meanwhile, it may have kept these very actors.
            if await is_open(run_id):
                return False
            _log.info("reaping the fleet of an ended run", run=run_id)
            await ending.teardown(found.fleet, found.engines)
        self._runs.pop(run, None)
        return True

    def _run(self, run: RunRef) -> _Run:
        if run not in self._runs:
            fleet = RunFleet(self._cluster, run)
            deaths = Deaths(fleet)
            engines = Engines(fleet, deaths, self._connect)
            self._runs[run] = _Run(fleet, deaths, engines, Router(fleet, deaths))
        return self._runs[run]
