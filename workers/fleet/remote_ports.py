"""Trainer and producer of a run as the ports that activities use."""

from activities.rollout.in_flight import ABORT_JOIN_S, JOIN_S
from models.checkpoint import CheckpointFile
from models.evaluation import EvaluateRequest, EvaluationReport, ExportReport
from models.ids import FenceToken
from models.ports import EngineHandle, ServingReport, StageProgress
from models.prompt import DataState
from models.publication import WeightBucket, WeightChannel, WeightsOffer, WeightsRef
from models.rollout import CollectRequest, RolloutCollection
from models.update import UpdateReport
from workers.fleet.calls import QUICK_TIMEOUT_S, RemoteActor

BOUNDARY_TIMEOUT_S = JOIN_S + ABORT_JOIN_S + QUICK_TIMEOUT_S
"""For a publication boundary: cancelled groups get their time to end."""


class RemoteTrainer:
    """``TrainerPort``. A cancelled caller leaves the trainer's work running.

    It must not stop half way; the next attempt joins it.
    """

    def __init__(self, actor: RemoteActor) -> None:
        self._actor = actor

    async def optimize(
        self, token: FenceToken, update: int, collection: RolloutCollection
    ) -> UpdateReport:
        """See ``TrainerPort``."""
        report: UpdateReport = await self._actor.call(
            "optimize", token, update, collection, timeout_s=None
        )
        return report

    async def export_weights(self, token: FenceToken, version: int) -> WeightsRef:
        """See ``TrainerPort``."""
        ref: WeightsRef = await self._actor.call("export_weights", token, version, timeout_s=None)
        return ref

    async def offer_weights(self, token: FenceToken, version: int) -> WeightsOffer:
        """See ``TrainerPort``."""
        offer: WeightsOffer = await self._actor.call(
            "offer_weights", token, version, timeout_s=None
        )
        return offer

    async def keep_offered(self, token: FenceToken, version: int) -> None:
        """See ``TrainerPort``."""
        await self._actor.call("keep_offered", token, version, timeout_s=None)

    async def kept(self, version: int) -> WeightsRef | None:
        """See ``TrainerPort``."""
        ref: WeightsRef | None = await self._actor.call("kept", version, timeout_s=None)
        return ref

    async def pack_bucket(self, token: FenceToken, version: int, index: int) -> WeightBucket:
        """See ``TrainerPort``."""
        bucket: WeightBucket = await self._actor.call(
            "pack_bucket", token, version, index, timeout_s=None
        )
        return bucket

    async def open_channel(
        self, token: FenceToken, engines: tuple[EngineHandle, ...], timeout_s: float
    ) -> WeightChannel:
        """See ``TrainerPort``."""
        channel: WeightChannel = await self._actor.call(
            "open_channel", token, engines, timeout_s, timeout_s=None
        )
        return channel

    async def connect_channel(self, token: FenceToken, name: str) -> None:
        """See ``TrainerPort``."""
        await self._actor.call("connect_channel", token, name, timeout_s=None)

    async def broadcast_bucket(
        self, token: FenceToken, version: int, index: int, name: str
    ) -> None:
        """See ``TrainerPort``."""
        await self._actor.call("broadcast_bucket", token, version, index, name, timeout_s=None)

    async def drop_bucket(self, token: FenceToken) -> None:
        """See ``TrainerPort``."""
        await self._actor.call("drop_bucket", token, timeout_s=None)

    async def exported(self) -> WeightsRef | None:
        """See ``TrainerPort``."""
        ref: WeightsRef | None = await self._actor.call("exported")
        return ref

    async def save(self, token: FenceToken, folder: str) -> tuple[CheckpointFile, ...]:
        """See ``TrainerPort``."""
        files: tuple[CheckpointFile, ...] = await self._actor.call(
            "save", token, folder, timeout_s=None
        )
        return files

    async def export(self, token: FenceToken, uri: str) -> ExportReport:
        """See ``TrainerPort``."""
        report: ExportReport = await self._actor.call("export", token, uri, timeout_s=None)
        return report

    async def progress(self) -> StageProgress:
        """See ``TrainerPort``."""
        progress: StageProgress = await self._actor.call("progress")
        return progress


class RemoteProducer:
    """``ProducerPort``. A cancelled caller cancels its call inside the producer."""

    def __init__(self, actor: RemoteActor) -> None:
        self._actor = actor

    async def collect(self, token: FenceToken, request: CollectRequest) -> RolloutCollection:
        """See ``ProducerPort``."""
        collection: RolloutCollection = await self._actor.call(
            "collect", token, request, timeout_s=None, cancel=True
        )
        return collection

    async def evaluate(self, token: FenceToken, request: EvaluateRequest) -> EvaluationReport:
        """See ``ProducerPort``."""
        report: EvaluationReport = await self._actor.call(
            "evaluate", token, request, timeout_s=None, cancel=True
        )
        return report

    async def data_state(self, consumed_through: int) -> DataState:
        """See ``ProducerPort``."""
        state: DataState = await self._actor.call("data_state", consumed_through)
        return state

    async def set_engines(
        self, token: FenceToken, urls: tuple[str, ...], *, healed: bool = False
    ) -> None:
        """See ``ProducerPort``."""
        await self._actor.call("set_engines", token, urls, healed)

    async def begin_publication(self, token: FenceToken, version: int) -> None:
        """See ``ProducerPort``."""
        await self._actor.call("begin_publication", token, version, timeout_s=BOUNDARY_TIMEOUT_S)

    async def end_publication(self, token: FenceToken, version: int) -> None:
        """See ``ProducerPort``."""
        await self._actor.call("end_publication", token, version, timeout_s=BOUNDARY_TIMEOUT_S)

    async def reports(self, after: int) -> tuple[ServingReport, ...]:
        """See ``ProducerPort``."""
        reports: tuple[ServingReport, ...] = await self._actor.call("reports", after)
        return reports

    async def progress(self) -> StageProgress:
        """See ``ProducerPort``."""
        progress: StageProgress = await self._actor.call("progress")
        return progress
