"""The engines of a run: spawn, list, heal."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

import structlog

from activities.wire.client import EngineClient
from configs.topology import Demand
from models.errors import ContractViolation, EngineLost, ServiceUnreachable
from models.ports import EngineHandle
from models.publication import WeightsRef
from workers.actors.engine import EngineActor
from workers.actors.order import ActorFacts
from workers.fleet.deaths import Deaths
from workers.fleet.placement import Bundle, engine_bundles, in_bundle, place, trainer_bundle
from workers.fleet.run_fleet import RunFleet

START_MARGIN_S = 30.0
"""Added to the server's own start deadline when waiting for its actor's answer."""

_log = structlog.get_logger(__name__)


class Ensured(NamedTuple):
    """Engines in rank order."""

    live: tuple[EngineHandle, ...]
    fresh: tuple[EngineHandle, ...]
    """Those of ``live`` that were started just now."""


class Engines:
    """All engines of one run."""

    def __init__(
        self,
        fleet: RunFleet,
        deaths: Deaths,
        connect: Callable[[str], EngineClient] = EngineClient,
    ) -> None:
        self._fleet = fleet
        self._deaths = deaths
        self._connect = connect
        self._clients: dict[str, EngineClient] = {}
        self._confirmed: dict[str, int] = {}

    async def live(self) -> tuple[EngineHandle, ...]:
        """Engines whose actor and server live, in rank order."""
        found = await self._all_facts()
        return tuple(_handle(facts) for facts in found.values() if facts is not None)

    async def ensure(self) -> Ensured:
        """Start every engine that is dead or foreign.

        Raises:
            EngineLost: a server did not start; the message holds the end of its log.
        """
        found = await self._all_facts()
        dead = [rank for rank, facts in found.items() if facts is None]
        handles = {rank: _handle(facts) for rank, facts in found.items() if facts is not None}
        if not dead:
            return Ensured(tuple(handles.values()), ())
        spawn = await self._spawner()
        started = await together(spawn(rank) for rank in dead)
        await self._deaths.started()
        handles |= dict(zip(dead, started, strict=True))
        return Ensured(tuple(handles[rank] for rank in sorted(handles)), tuple(started))

    async def stale(
        self, weights: WeightsRef, handles: tuple[EngineHandle, ...]
    ) -> tuple[EngineHandle, ...]:
        """Those of ``handles`` that do not say that they serve the version of ``weights``."""
        versions = await asyncio.gather(*(self._version(each, weights) for each in handles))
        return tuple(
            handle
            for handle, version in zip(handles, versions, strict=True)
            if version != weights.version
        )

    async def close(self) -> None:
        """Forget caches and connections; engines go on."""
        await self._deaths.close()
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()

    async def _all_facts(self) -> dict[int, ActorFacts | None]:
        """Rank -> facts of an engine that serves and belongs to the run, None of any other."""
        spec = await self._fleet.spec()
        ranks = range(spec.inference.num_engines)
        answers = await asyncio.gather(*(self._fleet.facts("engine", rank) for rank in ranks))
        return {
            rank: facts if facts is not None and self._fleet.belongs(facts) else None
            for rank, facts in zip(ranks, answers, strict=True)
        }

    async def _spawner(self) -> Callable[[int], Awaitable[EngineHandle]]:
        """Starts the engine of a rank where the run's placement has room for it."""
        spec = await self._fleet.spec()
        demand, bundles = spec.gpu_demand, engine_bundles(spec)
        if demand is None or not demand.colocated:
            group = await self._placed("engines", bundles, (trainer_bundle(spec),))
            num_gpus = 0 if demand is None else demand.tensor_parallel
            return lambda rank: self._spawn(rank, in_bundle(group, rank, num_gpus))
        group = await self._placed("trainer", (trainer_bundle(spec),), ())
        devices = await self._trainer_gpus()
        options = in_bundle(group, 0)
        return lambda rank: self._spawn(rank, options, shared_gpus(devices, rank, demand))

    async def _placed(
        self, role: str, bundles: tuple[Bundle, ...], beside: tuple[Bundle, ...]
    ) -> Any:
        timeout_s = await self._fleet.startup_timeout_s()
        cluster, run_id = self._fleet.cluster, self._fleet.run.run_id
        return await place(cluster, run_id, role, bundles, timeout_s, beside=beside)

    async def _trainer_gpus(self) -> tuple[str, ...]:
        """Devices of the live trainer.

        Raises:
            TrainerLost: there is none, so nobody holds the GPUs that engines would share.
        """
        facts: ActorFacts = await self._fleet.actor("trainer").call("facts")
        return facts.status.gpus

    async def _spawn(
        self, rank: int, options: dict[str, Any], gpus: tuple[str, ...] = ()
    ) -> EngineHandle:
        spec = await self._fleet.spec()
        actor = await self._fleet.create("engine", rank, EngineActor, options, gpus=gpus)
        timeout_s = self._fleet.scaled(spec.inference.start_timeout_s) + START_MARGIN_S
        timeout_s += await self._fleet.download_timeout_s()
        facts: ActorFacts = await actor.call("start", timeout_s=timeout_s)
        await self._fleet.remember(facts.status)
        _log.info("engine started", engine=actor.name, url=facts.status.url)
        return _handle(facts)

    async def _version(self, engine: EngineHandle, weights: WeightsRef) -> int | None:
        """Version that an engine serves; asked once for each, since versions only grow."""
        key = f"{engine.name}.{engine.incarnation}"
        if self._confirmed.get(key) == weights.version:
            return weights.version
        if engine.url not in self._clients:
            self._clients[engine.url] = self._connect(engine.url)
        try:
            info = await self._clients[engine.url].model_info()
        except (ServiceUnreachable, ContractViolation):
            return None
        text = str(info.get("weight_version", ""))
        version = int(text) if text.isdecimal() else None
        if version == weights.version:
            self._confirmed[key] = version
        return version


def shared_gpus(devices: tuple[str, ...], rank: int, demand: Demand) -> tuple[str, ...]:
    """The consecutive ones of the trainer's ``devices`` that colocated engine ``rank`` uses.

    Raises:
        ContractViolation: the trainer has other GPUs than the run file says.
    """
    if len(devices) != demand.trainer:
        raise ContractViolation(
            f"the trainer sees GPUs {list(devices)}, colocated engines share {demand.trainer}"
        )
    first = rank * demand.tensor_parallel
    return devices[first : first + demand.tensor_parallel]


async def together(work: Iterable[Any]) -> list[Any]:
    """Results of concurrent coroutines; the first error ends the others and is raised as it is."""
    tasks = [asyncio.ensure_future(each) for each in work]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and (error := task.exception()) is not None:
                raise error
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _handle(facts: ActorFacts) -> EngineHandle:
    status = facts.status
    if status.url is None:
        raise EngineLost(f"{facts.order.name} of {facts.order.run.run_id} has no address")
    return EngineHandle(
        name=facts.order.name,
        url=status.url,
        incarnation=facts.order.incarnation,
        gpus=status.gpus,
    )
