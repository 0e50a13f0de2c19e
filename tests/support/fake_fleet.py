"""A fleet in memory behind ``models.ports``: fenced like the real one, scriptable, with a log."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from activities.fencing import FenceGuard
from activities.site import Site
from activities.storage.commit import read_marker
from activities.storage.store import Store
from models.errors import (
    ContractViolation,
    EngineLost,
    PerdureError,
    ProducerLost,
)
from models.evaluation import EvaluateRequest, EvaluationReport
from models.ids import FenceToken, RunRef
from models.ports import ActorStatus, EngineHandle, RouterHandle, ServingReport, StageProgress
from models.prompt import DataState
from models.rollout import CollectionCounts, CollectRequest, RolloutCollection
from models.run import PrepareReport, PrepareRequest
from tests.support.fake_engines import FakeEngine, FakeEngineClient, Script
from tests.support.fake_router import FakeRouter, FakeRouterClient
from tests.support.fake_trainer import FakeTrainer


class FakeProducer:
    """Collections without samples; remembers the last ones like the real producer."""

    def __init__(self, script: Script, store: Store, requests: list[CollectRequest]) -> None:
        self.script, self.store, self.requests = script, store, requests
        self.guard = FenceGuard("producer")
        self.alive = True
        self.urls: tuple[str, ...] = ()
        self.published = -1
        self.publishing: int | None = None
        self.serving_reports: list[ServingReport] = []

    def _check(self, token: FenceToken | None = None) -> None:
        if not self.alive:
            raise ProducerLost("the producer is gone")
        if token is not None:
            self.guard.admit(token)

    async def collect(self, token: FenceToken, request: CollectRequest) -> RolloutCollection:
        self._check(token)
        self.requests.append(request)
        await self._play(f"collect {request.update}")
        return RolloutCollection(
            update=request.update,
            epoch=request.epoch,
            uri=f"rollouts/{request.update:07d}.e{request.epoch}.parquet",
            sha256=hashlib.sha256(f"{request.update} {request.epoch}".encode()).hexdigest(),
            counts=CollectionCounts(groups=2, samples=4, prompt_tokens=8, response_tokens=40),
            reward_mean=0.1 + 0.01 * request.update,
            min_version=request.policy_version,
            max_version=request.policy_version,
            seconds=0.5,
        )

    async def evaluate(self, token: FenceToken, request: EvaluateRequest) -> EvaluationReport:
        self._check(token)
        await self._play(f"evaluate {request.update} {request.phase}")
        report = EvaluationReport(
            update=request.update,
            policy_version=request.policy_version,
            name="reward",
            prompts=3,
            samples=3,
            reward_mean=0.5,
            truncated_fraction=0.0,
            error_fraction=0.0,
            mean_response_tokens=7.0,
            uri=f"rollouts/eval_{request.update:07d}.parquet",
            seconds=0.1,
        )
        return report.model_copy(update=self.script.reports.get(request.phase, {}))

    async def data_state(self, consumed_through: int) -> DataState:
        self._check()
        self.script.log.append(f"data_state {consumed_through}")
        return DataState(sample_group_index=2 * (consumed_through + 1))

    async def set_engines(
        self, token: FenceToken, urls: tuple[str, ...], *, healed: bool = False
    ) -> None:
        self.healed = healed
        self._check(token)
        self.urls = urls

    async def begin_publication(self, token: FenceToken, version: int) -> None:
        self._check(token)
        await self._play(f"begin_publication {version}")
        self.publishing = version

    async def end_publication(self, token: FenceToken, version: int) -> None:
        self._check(token)
        await self._play(f"end_publication {version}")
        if version not in (self.publishing, self.published):
            raise ContractViolation(f"version {version} ends, {self.publishing} was begun")
        self.published, self.publishing = version, None

    async def reports(self, after: int) -> tuple[ServingReport, ...]:
        self._check()
        return tuple(report for report in self.serving_reports if report.number > after)

    async def progress(self) -> StageProgress:
        self._check()
        return StageProgress(stage="collect", done=1, total=4)

    async def _play(self, call: str) -> None:
        try:
            await self.script.play(call)
        except ProducerLost:
            self.alive = False
            raise


class FakeFleet:
    """``models.ports.FleetPort`` for one run."""

    def __init__(self, num_engines: int = 1, *, with_router: bool = False) -> None:
        """``with_router``: as for a fully async run, prepared and healed with the engines."""
        self.script = Script()
        self.num_engines = num_engines
        self.with_router = with_router
        self.router_process: FakeRouter | None = None
        self.engine_list: list[FakeEngine] = []
        self.deaths: list[asyncio.Queue[str]] = []
        self.torn_down = False
        self.caches_published = 0
        self.fleet_seconds = 0.0
        self.revoked = -1
        self._trainer: FakeTrainer | None = None
        self._producer: FakeProducer | None = None
        self.all_applied: list[int] = []
        self.all_requests: list[CollectRequest] = []

    @property
    def log(self) -> list[str]:
        return self.script.log

    @property
    def live_trainer(self) -> FakeTrainer:
        assert self._trainer is not None
        return self._trainer

    @property
    def live_producer(self) -> FakeProducer:
        assert self._producer is not None
        return self._producer

    async def prepare(self, token: FenceToken, request: PrepareRequest) -> PrepareReport:
        await self.script.play("prepare")
        store = Store(request.run.root)
        rebuilt: list[str] = []
        trainer = self._trainer
        keep = trainer is not None and trainer.alive and not request.resume_exactly
        if not keep or trainer is None:
            if trainer is not None:
                self.all_applied += trainer.applied
            trainer = FakeTrainer(self.script, store)
            if request.checkpoint is not None:
                clock = read_marker(store, request.checkpoint).clock
                trainer.next_update = clock.next_rollout_id
                trainer.policy_version = clock.completed_steps
            self._trainer = trainer
            rebuilt.append("trainer")
        if not keep or self._producer is None or not self._producer.alive:
            self._producer = FakeProducer(self.script, store, self.all_requests)
            rebuilt.append("producer")
        while len(self.engine_list) < self.num_engines:
            self.engine_list.append(await self.spawn(f"engine-{len(self.engine_list)}", 0))
        self._heal_router()
        trainer.guard.admit(token)
        self.torn_down = False
        self.script.log.append(f"prepared {trainer.next_update} {','.join(rebuilt)}")
        return PrepareReport(
            next_update=trainer.next_update,
            policy_version=trainer.policy_version,
            consumed_through=trainer.next_update - 1,
            rebuilt=tuple(rebuilt),
            fleet_seconds=self.fleet_seconds,
        )

    async def spawn(self, name: str, incarnation: int) -> FakeEngine:
        """A new engine, without weights."""
        return FakeEngine(name, f"http://{name}.{incarnation}", incarnation)

    def trainer(self, run: RunRef) -> FakeTrainer:
        return self.live_trainer

    def producer(self, run: RunRef) -> FakeProducer:
        return self.live_producer

    async def engines(self, run: RunRef) -> tuple[EngineHandle, ...]:
        return tuple(engine.handle for engine in self.engine_list if engine.alive)

    @property
    def live_router(self) -> FakeRouter:
        assert self.router_process is not None
        return self.router_process

    async def router(self, run: RunRef) -> RouterHandle | None:
        if not self.with_router:
            return None
        if self.router_process is None or not self.router_process.alive:
            raise EngineLost("the router is gone")
        return self.router_process.handle

    async def replace_engines(self, token: FenceToken, run: RunRef, names: tuple[str, ...]) -> None:
        self.script.log.append(f"replace {','.join(names)}")
        for rank, engine in enumerate(self.engine_list):
            if engine.name in names:
                self.kill_engine(rank)
        if "router" in names:
            self.kill_router()

    def _heal_router(self) -> None:
        """Start the router if the run has one and it is dead; it begins without a table."""
        if not self.with_router:
            return
        before = self.router_process
        if before is None or not before.alive:
            incarnation = 0 if before is None else before.incarnation + 1
            self.router_process = FakeRouter(f"http://router.{incarnation}", incarnation)
            self.script.log.append(f"started router {incarnation}")

    async def ensure_engines(self, token: FenceToken, run: RunRef) -> tuple[EngineHandle, ...]:
        await self._respawned()
        return await self.engines(run)

    async def heal_engines(self, token: FenceToken, run: RunRef) -> tuple[EngineHandle, ...]:
        return await self._respawned()

    async def _respawned(self) -> tuple[EngineHandle, ...]:
        if self.script.faults.get("heal"):
            raise self.script.faults["heal"].pop(0)
        self._heal_router()
        fresh = []
        for rank, engine in enumerate(self.engine_list):
            if not engine.alive:
                self.engine_list[rank] = await self.spawn(engine.name, engine.incarnation + 1)
                fresh.append(self.engine_list[rank].handle)
                self.script.log.append(f"respawned {engine.name}")
        return tuple(fresh)

    @asynccontextmanager
    async def engine_deaths(self, run: RunRef) -> AsyncIterator[AsyncIterator[str]]:
        queue: asyncio.Queue[str] = asyncio.Queue()
        self.deaths.append(queue)

        async def names() -> AsyncIterator[str]:
            while True:
                yield await queue.get()

        try:
            yield names()
        finally:
            self.deaths.remove(queue)

    def kill_engine(self, rank: int) -> None:
        """End an engine and tell who listens."""
        self.engine_list[rank].alive = False
        for queue in self.deaths:
            queue.put_nowait(self.engine_list[rank].name)

    def kill_router(self) -> None:
        """End the router and tell who listens."""
        self.live_router.alive = False
        for queue in self.deaths:
            queue.put_nowait("router")

    def router_client(self, url: str) -> FakeRouterClient:
        """The client of the router that has this URL; an old URL answers nothing."""
        router = self.router_process
        if router is None or router.url != url:
            router = FakeRouter(url, alive=False)
        return FakeRouterClient(router, self.script)

    def client(self, url: str) -> FakeEngineClient:
        """The client of the engine that has this URL; an old URL answers nothing."""
        for engine in self.engine_list:
            if engine.url == url:
                return FakeEngineClient(engine, self.script)
        return FakeEngineClient(FakeEngine("gone", url, alive=False), self.script)

    async def revoke(self, run: RunRef, epoch: int) -> None:
        self.script.log.append(f"revoke {epoch}")
        self.revoked = epoch
        if self._trainer is not None:
            self._trainer.guard.revoke(epoch)
        if self._producer is not None:
            self._producer.guard.revoke(epoch)

    async def publish_caches(self, run: RunRef) -> None:
        self.caches_published += 1

    async def teardown(self, run: RunRef) -> None:
        self.script.log.append("teardown")
        self.torn_down = True
        self.engine_list = []
        self.router_process = None
        if self._trainer is not None:
            self.all_applied += self._trainer.applied
        self._trainer = self._producer = None

    async def status(self, run: RunRef) -> tuple[ActorStatus, ...]:
        return ()


class ListTracker:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, run: RunRef, metrics: Mapping[str, float]) -> None:
        self.rows.append(dict(metrics))


def site_of(fleet: FakeFleet, tracker: ListTracker | None = None) -> Site:
    """A site on the fake fleet."""
    return Site(
        fleet=fleet,
        tracker=tracker or ListTracker(),
        engine=fleet.client,
        router=fleet.router_client,
    )


def fault(kind: type[PerdureError], text: str = "scripted") -> PerdureError:
    """A scripted error."""
    return kind(text)
