"""What this process knows of one run's fleet: caches only, all of it can be found again."""

import asyncio
from typing import Any, NamedTuple

from activities.multiplier import infra_timeout_multiplier
from activities.site import spec_of, store_of
from activities.storage.store import Store
from configs.run import RunSpec
from models.errors import ActorLost, EngineLost, ProducerLost, ServiceUnreachable, TrainerLost
from models.ids import RunRef
from models.ports import ActorStatus
from workers.actors.order import (
    ActorFacts,
    ActorOrder,
    actor_name,
    fleet_token,
    require_same_code,
)
from workers.fleet.calls import QUICK_TIMEOUT_S, RemoteActor
from workers.fleet.cluster import RayCluster
from workers.fleet.folders import scratch_folder
from workers.fleet.record import FleetRecord
from workers.source_digest import source_digest

LOST: dict[str, type[ActorLost]] = {
    "trainer": TrainerLost,
    "producer": ProducerLost,
    "engine": EngineLost,
    "router": EngineLost,
}


class Cause(NamedTuple):
    """Why a process lives again: kind of what failed, if something did, and words."""

    kind: str
    reason: str


class RunFleet:
    """Actors, record and lock of one run. Whoever makes or ends actors holds ``lock``."""

    def __init__(self, cluster: RayCluster, run: RunRef) -> None:
        self.cluster = cluster
        self.run = run
        self.store: Store = store_of(run)
        self.record = FleetRecord(self.store)
        self.lock = asyncio.Lock()
        self._actors: dict[str, RemoteActor] = {}
        self._causes: dict[str, Cause] = {}
        self._record_lock = asyncio.Lock()

    async def spec(self) -> RunSpec:
        """The resolved run file, checked against the run's digest."""
        return await asyncio.to_thread(spec_of, self.run)

    async def startup_timeout_s(self) -> float:
        """Deadline for placing and starting one component, in seconds."""
        return self.scaled((await self.spec()).launch.startup_timeout_s)

    async def download_timeout_s(self) -> float:
        """What the start of a component may take besides, for files of a root in a bucket."""
        if self.store.is_local:
            return 0.0
        return self.scaled((await self.spec()).launch.download_timeout_s)

    def scaled(self, timeout_s: float) -> float:
        """A deadline on this cluster, in seconds."""
        return timeout_s * infra_timeout_multiplier()

    def actor(self, role: str, rank: int = 0) -> RemoteActor:
        """The actor of (role, rank), whether it lives or not."""
        name = actor_name(role, rank)
        if name not in self._actors:
            self._actors[name] = RemoteActor(self.cluster, self.run.run_id, name, LOST[role])
        return self._actors[name]

    async def facts(self, role: str, rank: int = 0) -> ActorFacts | None:
        """What a live actor says about itself; None when it is dead or does not answer."""
        name, actor = actor_name(role, rank), self.actor(role, rank)
        try:
            facts: ActorFacts = await actor.call("facts", timeout_s=quick_timeout_s())
        except (ActorLost, ServiceUnreachable) as error:
            first = actor.loss or error
            self.note(name, Cause(type(first).__name__, first.message))
            return None
        if self.belongs(facts):
            self._causes.pop(name, None)  # it was out of reach only
        return facts

    def note(self, name: str, cause: Cause) -> None:
        """Why the actor ``name`` will have to live again; of several causes the first counts."""
        self._causes.setdefault(name, cause)

    def belongs(self, facts: ActorFacts) -> bool:
        """Whether an actor was made for this run, this run file and this code, and is fit."""
        return (
            facts.serving
            and facts.order.run == self.run
            and facts.status.code_digest == source_digest()
        )

    async def create(
        self,
        role: str,
        rank: int,
        actor_class: type,
        options: dict[str, Any],
        class_options: dict[str, Any] | None = None,
        gpus: tuple[str, ...] = (),
    ) -> RemoteActor:
        """Replace the actor of (role, rank) by a new one, counted as its next incarnation.

        ``gpus``: devices that it shares with another actor, which holds them.

        Raises:
            ConfigurationError: the new actor runs other code than this process.
            ServiceUnreachable: Ray did not start it in time.
        """
        name = actor_name(role, rank)
        incarnation, former = await self._former(role, rank)
        cause = Cause("", "") if former is None else await self._cause(former)
        order = ActorOrder(
            run=self.run,
            role=role,
            rank=rank,
            incarnation=incarnation,
            last_failure=cause.kind,
            reason=cause.reason,
            scratch=str(scratch_folder(self.run.root)),
            timeout_factor=infra_timeout_multiplier(),
            engine_token=fleet_token(),
            gpus=gpus,
        )
        handle = await self.cluster.create(
            actor_class, self.run.run_id, name, options, class_options or {}, order
        )
        actor = self.actor(role, rank)
        actor.adopt(handle)
        self._causes.pop(name, None)
        facts: ActorFacts = await actor.call("facts", timeout_s=await self.startup_timeout_s())
        require_same_code(facts, source_digest())
        await self.remember(facts.status)
        return actor

    async def remember(self, *statuses: ActorStatus) -> None:
        """Write the newest statuses to the run's record."""
        async with self._record_lock:
            await asyncio.to_thread(self.record.write, *statuses)

    async def rows(self) -> tuple[ActorStatus, ...]:
        """The record as it is on storage now."""
        async with self._record_lock:
            self.record.refresh()
            return await asyncio.to_thread(self.record.rows)

    async def _former(self, role: str, rank: int) -> tuple[int, ActorStatus | None]:
        """The number of the next life of (role, rank), and the life before it."""
        async with self._record_lock:
            self.record.refresh()
            number = await asyncio.to_thread(self.record.next_incarnation, role, rank)
            return number, self.record.newest(role, rank)

    async def _cause(self, former: ActorStatus) -> Cause:
        """Why ``former`` is replaced: as it was noted, else as it, or its absence, tells now."""
        name = actor_name(former.role, former.rank)
        if not former.alive:
            return Cause("", "started again with its run")
        loss = self.actor(former.role, former.rank).loss
        if loss is not None:
            self.note(name, Cause(type(loss).__name__, loss.message))
        facts = None if name in self._causes else await self.facts(former.role, former.rank)
        if facts is None:
            return self._causes[name]
        if facts.order.run != self.run:
            return Cause("", "the life before was made for another run file")
        if facts.status.code_digest != source_digest():
            return Cause("", "the life before ran other code")
        if facts.serving:
            return Cause("", "the run went back to where its files are")
        log = f": see logs/{name}.log" if former.role == "engine" else ""
        return Cause(LOST[former.role].__name__, f"its process ended{log}")


def quick_timeout_s() -> float:
    """Deadline of calls that an actor answers from memory, on this cluster."""
    return QUICK_TIMEOUT_S * infra_timeout_multiplier()
