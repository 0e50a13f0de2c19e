"""A fleet in memory behind ``models.ports``: fenced like the real one, scriptable, with a log."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from activities.fencing import FenceGuard
from activities.site import Site
from activities.storage.commit import read_marker
from activities.storage.store import Store
from activities.wire.digest import weights_digest
from models.checkpoint import CheckpointFile
from models.errors import PerdureError, ProducerLost, TrainerLost
from models.evaluation import EvaluateRequest, EvaluationReport, ExportReport
from models.ids import FenceToken, RunRef
from models.ports import ActorStatus, EngineHandle, StageProgress
from models.prompt import DataState
from models.publication import WeightsRef
from models.rollout import CollectionCounts, CollectRequest, RolloutCollection
from models.run import PrepareReport, PrepareRequest
from models.update import UpdateReport
from tests.support.fake_engines import FakeEngine, FakeEngineClient, Script, checksums_of


class FakeTrainer:
    """Counts instead of learning; one optimizer step an update."""

    def __init__(self, script: Script, store: Store) -> None:
        self.script, self.store = script, store
        self.guard = FenceGuard("trainer")
        self.alive = True
        self.next_update = 0
        self.policy_version = 0
        self.no_signal: set[int] = set()
        self.reports: dict[tuple[int, str], UpdateReport] = {}
        self.export_ref: WeightsRef | None = None
        self.applied: list[int] = []

    def _check(self, token: FenceToken | None = None) -> None:
        if not self.alive:
            raise TrainerLost("the trainer is gone")
        if token is not None:
            self.guard.admit(token)

    async def optimize(
        self, token: FenceToken, update: int, collection: RolloutCollection
    ) -> UpdateReport:
        self._check(token)
        await self._play(f"optimize {update}")
        key = (update, collection.sha256)
        if key not in self.reports:
            self._check(token)
            steps = 0 if update in self.no_signal else 1
            self.policy_version += steps
            self.next_update = update + 1
            self.applied.append(update)
            self.reports[key] = UpdateReport(
                update=update,
                batch_sha256=collection.sha256,
                policy_version=self.policy_version,
                optimizer_steps=steps,
                no_signal=steps == 0,
                metrics={"train/loss": 0.5},
                seconds=0.01,
            )
        return self.reports[key]

    async def export_weights(self, token: FenceToken, version: int) -> WeightsRef:
        self._check(token)
        await self._play(f"export_weights {version}")
        assert version == self.policy_version
        self.export_ref = WeightsRef(
            version=version,
            path=f"mem/{version}",
            digest=weights_digest(checksums_of(version)),
            num_tensors=1,
            num_bytes=8,
            dtype="float32",
        )
        return self.export_ref

    async def exported(self) -> WeightsRef | None:
        self._check()
        return self.export_ref

    async def save(self, token: FenceToken, folder: str) -> tuple[CheckpointFile, ...]:
        self._check(token)
        await self._play(f"save {self.next_update - 1}")
        data = f"{self.policy_version}".encode()
        self.store.write_bytes(f"{folder}/model/state.bin", data)
        digest = hashlib.sha256(data).hexdigest()
        return (CheckpointFile(path="model/state.bin", sha256=digest, num_bytes=len(data)),)

    async def export(self, token: FenceToken, uri: str) -> ExportReport:
        self._check(token)
        await self._play("export")
        return ExportReport(
            uri=uri,
            policy_version=self.policy_version,
            num_bytes=8,
            num_parameters=2,
            max_abs_logit_difference=0.0,
            seconds=0.01,
        )

    async def progress(self) -> StageProgress:
        self._check()
        return StageProgress(stage="optimize", done=1, total=2)

    async def _play(self, call: str) -> None:
        try:
            await self.script.play(call)
        except TrainerLost:
            self.alive = False
            raise


class FakeProducer:
    """Collections without samples; remembers the last ones like the real producer."""

    def __init__(self, script: Script, store: Store, requests: list[CollectRequest]) -> None:
        self.script, self.store, self.requests = script, store, requests
        self.guard = FenceGuard("producer")
        self.alive = True
        self.urls: tuple[str, ...] = ()
        self.version = -1

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
        return EvaluationReport(
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

    async def data_state(self, consumed_through: int) -> DataState:
        self._check()
        self.script.log.append(f"data_state {consumed_through}")
        return DataState(sample_group_index=2 * (consumed_through + 1))

    async def set_engines(self, token: FenceToken, urls: tuple[str, ...]) -> None:
        self._check(token)
        self.urls = urls

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

    def __init__(self, num_engines: int = 1) -> None:
        self.script = Script()
        self.num_engines = num_engines
        self.engine_list: list[FakeEngine] = []
        self.deaths: list[asyncio.Queue[str]] = []
        self.torn_down = False
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
        keep = trainer is not None and trainer.alive
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
            rank = len(self.engine_list)
            self.engine_list.append(FakeEngine(f"engine-{rank}", f"http://engine-{rank}.0"))
        trainer.guard.admit(token)
        self.torn_down = False
        self.script.log.append(f"prepared {trainer.next_update} {','.join(rebuilt)}")
        return PrepareReport(
            next_update=trainer.next_update,
            policy_version=trainer.policy_version,
            consumed_through=trainer.next_update - 1,
            rebuilt=tuple(rebuilt),
        )

    def trainer(self, run: RunRef) -> FakeTrainer:
        return self.live_trainer

    def producer(self, run: RunRef) -> FakeProducer:
        return self.live_producer

    async def engines(self, run: RunRef) -> tuple[EngineHandle, ...]:
        return tuple(engine.handle for engine in self.engine_list if engine.alive)

    async def heal_engines(self, token: FenceToken, run: RunRef) -> tuple[EngineHandle, ...]:
        fresh = []
        for rank, engine in enumerate(self.engine_list):
            if not engine.alive:
                incarnation = engine.incarnation + 1
                self.engine_list[rank] = FakeEngine(
                    engine.name, f"http://{engine.name}.{incarnation}", incarnation
                )
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

    async def teardown(self, run: RunRef) -> None:
        self.script.log.append("teardown")
        self.torn_down = True
        self.engine_list = []
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
    return Site(fleet=fleet, tracker=tracker or ListTracker(), engine=fleet.client)


def fault(kind: type[PerdureError], text: str = "scripted") -> PerdureError:
    """A scripted error."""
    return kind(text)
