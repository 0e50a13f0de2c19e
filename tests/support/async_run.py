"""A fully async run as its workflow drives it, with a trainer that only counts."""

import asyncio
from collections.abc import Sequence

from activities.rollout.collection_file import read_collection
from activities.rollout.producer import RolloutProducer
from activities.storage.layout import collection_manifest
from configs.run import RunSpec
from models.evaluation import EvaluateRequest, EvaluationReport
from models.ids import FenceToken
from models.prompt import DataState
from models.rollout import CollectionManifest, CollectRequest, RolloutCollection
from tests.support.rollout_rig import RolloutRig

ROUTER = "http://one"
LIMIT_S = 30.0


class AsyncRun:
    """Publishes, collects and trains under one epoch after the other."""

    def __init__(self, rig: RolloutRig, spec: RunSpec | None = None, **options: object) -> None:
        self.rig = rig
        self.spec = spec or rig.async_spec()
        self.options = options
        self.epoch = 1
        self.update = 0
        """The next update; what precedes it is trained."""
        self.version = 0
        """The policy version of the trainer."""
        self.trained: list[RolloutCollection] = []
        self.producer = self.build()

    def build(self, state: DataState | None = None) -> RolloutProducer:
        """A producer that starts at ``state``; the former one, if any, is left to itself."""
        self.producer = self.rig.producer(self.spec, state=state, **self.options)
        return self.producer

    def token(self, attempt: int = 1) -> FenceToken:
        return FenceToken(epoch=self.epoch, update=self.update, attempt=attempt)

    async def start(self) -> None:
        """Route to the engine and publish, as the first two stages of an epoch do."""
        await self.producer.set_engines(self.token(), (ROUTER,))
        await self.publish()

    async def publish(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.producer.begin_publication(self.token(), self.version)
            self.rig.engine.version = str(self.version)
            await self.producer.end_publication(self.token(), self.version)

    def request(self) -> CollectRequest:
        return CollectRequest(
            run=self.rig.run,
            epoch=self.epoch,
            update=self.update,
            policy_version=self.version,
            consumed_through=self.update - 1,
        )

    async def collect(self) -> RolloutCollection:
        async with asyncio.timeout(LIMIT_S):
            return await self.producer.collect(self.token(5), self.request())

    async def evaluate(self, attempt: int = 4) -> EvaluationReport:
        request = EvaluateRequest(
            run=self.rig.run,
            epoch=self.epoch,
            update=self.update,
            policy_version=self.version,
            phase="periodic",
        )
        async with asyncio.timeout(LIMIT_S):
            return await self.producer.evaluate(self.token(attempt), request)

    def train(self, collection: RolloutCollection) -> None:
        """Apply the update: K optimizer steps."""
        assert collection.update == self.update
        self.trained.append(collection)
        self.update += 1
        self.version += self.spec.steps_per_update

    async def updates(self, count: int) -> None:
        """Collect, train, publish, ``count`` times."""
        for _ in range(count):
            self.train(await self.collect())
            await self.publish()

    def revoke(self) -> None:
        """The epoch is over; the producer is kept."""
        self.producer.revoke(self.epoch)
        self.epoch += 1

    async def rebuild(self) -> None:
        """The producer is gone; its heir starts after the last trained collection."""
        await self.producer.close()
        self.epoch += 1
        self.build(self.state_after(self.update - 1))

    def state_after(self, update: int) -> DataState | None:
        """The data position after a trained collection; None before the first."""
        if update < 0:
            return None
        return self.manifest(self.trained[update]).data_after

    def manifest(self, collection: RolloutCollection) -> CollectionManifest:
        rel = collection_manifest(collection.update, collection.epoch)
        return CollectionManifest.model_validate(self.rig.store.read_json(rel))

    def groups(self, collection: RolloutCollection) -> list[int]:
        """Group indices of a collection."""
        return [group.group_index for group in read_collection(self.rig.store, collection)]

    def trained_prompts(self) -> list[tuple[str, int]]:
        """(prompt, epoch of the data) in the order of training."""
        return [
            (group.prepared_sample_id, group.epoch_id)
            for collection in self.trained
            for group in read_collection(self.rig.store, collection)
        ]

    def require_accounted(self, collection: RolloutCollection) -> None:
        """drawn = trained + dropped + pending, each group in one of them, after ``collection``.

        ``collection`` is committed and may or may not be trained.
        """
        line = [*self.trained[: collection.update], collection]
        manifest = self.manifest(collection)
        fates: list[int] = [draw.group_index for draw in manifest.data_after.pending]
        for each in line:
            fates += self.groups(each)
            fates += [dropped.draw.group_index for dropped in self.manifest(each).dropped]
        assert sorted(fates) == [*range(manifest.data_after.sample_group_index)]


async def until(condition, limit_s: float = LIMIT_S) -> None:
    """Let the loop turn until ``condition()``."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.001)


def held(draws: Sequence[object]) -> list[int]:
    """Group indices of draws."""
    return [draw.group_index for draw in draws]  # type: ignore[attr-defined]
