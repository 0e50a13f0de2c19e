"""Ports: what activities need from the GPU plane. ``workers/fleet.py`` implements them with Ray.

Every mutating call carries a ``FenceToken`` that the component compares atomically with the
mutation and refuses with ``StaleFence``. Every call raises an ``ActorLost`` leaf when its actor is
dead, at once, and never waits for a dead one.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from models.background import BackgroundOrder
from models.base import Carried, Frozen
from models.checkpoint import CheckpointFile
from models.evaluation import EvaluateRequest, EvaluationReport, ExportReport
from models.ids import FenceToken, RunRef
from models.prompt import DataState
from models.publication import WeightBucket, WeightChannel, WeightsOffer, WeightsRef
from models.rollout import CollectRequest, RolloutCollection
from models.run import PrepareReport, PrepareRequest
from models.update import UpdateReport


class StageProgress(Frozen):
    """What a long call has done so far; goes into heartbeats and the live display."""

    stage: str
    done: int = 0
    total: int = 0
    detail: str = ""


class ActorStatus(Carried):
    """One process of the fleet, for ``perdure status``."""

    role: str
    """``trainer``, ``engine``, ``router`` or ``producer``."""
    rank: int
    pid: int
    host: str
    incarnation: int
    """Counts rebuilds of this (role, rank) within the run, from 0."""
    alive: bool = True
    url: str | None = None
    policy_version: int | None = None
    resident_bytes: int | None = None
    code_digest: str = ""
    gpus: tuple[str, ...] = ()
    """Devices that the process sees, as CUDA counts them on its host."""
    started_unix: float | None = None
    """When the process began; none in records of versions that did not say."""
    last_failure: str = ""
    """What ended the life before this one: kind of the error; empty when nothing failed."""
    reason: str = ""
    """Why this life began, in words; empty for the first one."""


class RankEvent(Carried):
    """A process of a trainer of several begins, or ends by itself: a row of ``TRAINER_RANKS``.

    Of ranks 1 and up: rank 0 is the trainer's own process, which has an ``ActorStatus``.
    """

    incarnation: int
    """The trainer's."""
    rank: int
    host: str
    time_unix: float
    pid: int | None = None
    """None where it ends."""
    ended: str = ""
    """Which rank ended and how; empty where it begins."""


class ServingReport(Frozen):
    """The ``errors/`` metrics of a producer at one moment; counters start with its process."""

    number: int
    """Counts from 1 within one producer process."""
    time_unix: float
    metrics: dict[str, float]


class EngineHandle(Frozen):
    """A live engine server."""

    name: str
    url: str
    incarnation: int
    gpus: tuple[str, ...] = ()
    """Devices that its processes see, as CUDA counts them on its host; none on a CPU."""


class TrainerPort(Protocol):
    """The optimizer. One mutating call at a time; ``progress`` answers during one."""

    async def optimize(
        self, token: FenceToken, update: int, collection: RolloutCollection
    ) -> UpdateReport:
        """Apply the update once; the same (update, digest) again returns the same report."""
        ...

    async def export_weights(self, token: FenceToken, version: int) -> WeightsRef:
        """Write the current weights for engines to load. ``version`` must be the current one."""
        ...

    async def offer_weights(self, token: FenceToken, version: int) -> WeightsOffer:
        """Describe the current weights for ``pack_bucket``; nothing is written.

        A single bucket is packed and comes with them.
        """
        ...

    async def keep_offered(self, token: FenceToken, version: int) -> None:
        """Copy what was offered last to the trainer's host, for ``kept``."""
        ...

    async def kept(self, version: int) -> WeightsRef | None:
        """A folder of the weights that were copied, written at the first call; also in an update.

        None when the weights of ``version`` are not there any more.
        """
        ...

    async def pack_bucket(self, token: FenceToken, version: int, index: int) -> WeightBucket:
        """Fill one bucket of what was offered; the one before it is given up.

        ``version`` must be the current one.
        """
        ...

    async def open_channel(
        self, token: FenceToken, engines: tuple[EngineHandle, ...], timeout_s: float
    ) -> WeightChannel:
        """A group for broadcasts to exactly these engines; one that is connected is used again.

        ``timeout_s``: seconds for its members to meet, and for each broadcast.
        """
        ...

    async def connect_channel(self, token: FenceToken, name: str) -> None:
        """Meet the engines, which are joining the group ``name`` meanwhile.

        Raises ``ServiceUnreachable`` when one does not come.
        """
        ...

    async def broadcast_bucket(
        self, token: FenceToken, version: int, index: int, name: str
    ) -> None:
        """Send the bucket that is packed to the group ``name``, whose engines are receiving it.

        Raises ``ServiceUnreachable`` when one does not take it; the group is given up then.
        """
        ...

    async def drop_bucket(self, token: FenceToken) -> None:
        """Give up the memory of the last bucket."""
        ...

    async def exported(self) -> WeightsRef | None:
        """The last export or offer, also while an update runs: what every engine must serve."""
        ...

    async def save(self, token: FenceToken, folder: str) -> tuple[CheckpointFile, ...]:
        """Write model, optimizer, scheduler and clock into ``folder`` (relative to the root)."""
        ...

    async def export(self, token: FenceToken, uri: str) -> ExportReport:
        """Write the Hugging Face folder, re-load it and compare logits."""
        ...

    async def progress(self) -> StageProgress:
        """What the running call has done so far."""
        ...


class ProducerPort(Protocol):
    """The rollout loop: draws prompts, samples groups, scores, commits collections."""

    async def collect(self, token: FenceToken, request: CollectRequest) -> RolloutCollection:
        """Commit the collection of ``request.update``; the same update again returns the same."""
        ...

    async def evaluate(self, token: FenceToken, request: EvaluateRequest) -> EvaluationReport:
        """Sample and score every held-out prompt under one policy version."""
        ...

    async def data_state(self, consumed_through: int) -> DataState:
        """Cursor and ledger under one lock, collections up to the index counted as consumed."""
        ...

    async def set_engines(
        self, token: FenceToken, urls: tuple[str, ...], *, healed: bool = False
    ) -> None:
        """Route to exactly these engines; each holds the published version and digest.

        In a fully async run the one address is the router's. ``healed``: some were replaced, so
        what failed under the former ones while nobody waited for a collection ends no run.
        """
        ...

    async def begin_publication(self, token: FenceToken, version: int) -> None:
        """The boundary before engines load ``version``; only called on a fully async producer.

        ``barrier``: admission closes, unfinished groups are cancelled, joined and requeued.
        ``refresh``: admission of new groups closes; calls that engines hand back wait for the end.
        ``rolling``: nothing closes; samples of ``version`` are legal from now on.
        Begun again, it does nothing.
        """
        ...

    async def end_publication(self, token: FenceToken, version: int) -> None:
        """Every engine serves ``version``: open what ``begin_publication`` closed.

        Refused when ``version`` is not the one that was begun last.
        """
        ...

    async def reports(self, after: int) -> tuple["ServingReport", ...]:
        """Reports numbered above ``after``, at most the newest few hundred."""
        ...

    async def progress(self) -> StageProgress:
        """What the running call has done so far."""
        ...


class RouterHandle(Frozen):
    """The live router of a fully async run."""

    url: str
    incarnation: int


class FleetPort(Protocol):
    """All actors of a run, with placement. Re-attaches by name; rebuilds what is dead."""

    async def prepare(self, token: FenceToken, request: PrepareRequest) -> PrepareReport:
        """Prepare model and data, then bring up (or re-attach to) trainer, engines, producer.

        A live trainer of the same run is kept when its next update is ``request.next_update`` or
        one later (an update whose report was lost with its worker); otherwise it is restored from
        ``request.checkpoint``. The producer is kept when its trainer is and it lives; else it
        starts from the manifest of the last consumed collection, or from the checkpoint's cursor.
        The report says what is true afterwards. Weights are not published here.
        """
        ...

    def trainer(self, run: RunRef) -> TrainerPort:
        """The run's trainer. Raises ``TrainerLost`` when called on a dead one."""
        ...

    def producer(self, run: RunRef) -> ProducerPort:
        """The run's producer."""
        ...

    async def engines(self, run: RunRef) -> tuple[EngineHandle, ...]:
        """Live engines, in rank order."""
        ...

    async def router(self, run: RunRef) -> RouterHandle | None:
        """The live router; None for a run that has none, which is every run but a fully async one.

        Raises:
            EngineLost: the run should have one and it is dead; ``ensure_engines`` replaces it.
        """
        ...

    async def replace_engines(self, token: FenceToken, run: RunRef, names: tuple[str, ...]) -> None:
        """End these engines (or ``router``) although they live: they hang, or failed an update.

        ``ensure_engines`` starts their replacements.
        """
        ...

    async def ensure_engines(self, token: FenceToken, run: RunRef) -> tuple[EngineHandle, ...]:
        """Respawn dead engines and a dead router; return all engines."""
        ...

    async def heal_engines(self, token: FenceToken, run: RunRef) -> tuple[EngineHandle, ...]:
        """``ensure_engines``; return those that do not serve what was exported last."""
        ...

    def engine_deaths(self, run: RunRef) -> AbstractAsyncContextManager[AsyncIterator[str]]:
        """Names of engines (and ``router``) as they die, while the context is open."""
        ...

    async def revoke(self, run: RunRef, epoch: int) -> None:
        """Refuse every token of ``epoch`` and below from now on, in every component."""
        ...

    async def publish_caches(self, run: RunRef) -> None:
        """Publish what the processes of a completed run compiled; best effort, bounded."""
        ...

    async def teardown(self, run: RunRef) -> None:
        """End every actor and engine process of the run and release its placement."""
        ...

    async def status(self, run: RunRef) -> tuple[ActorStatus, ...]:
        """Every actor of the run, for people."""
        ...


class Tracker(Protocol):
    """A copy of the metrics for people's dashboards. Never raises, never blocks for long."""

    def log(self, run: RunRef, metrics: Mapping[str, float]) -> None:
        """Record one row; its axis is the declared axis of its names."""
        ...


class EvaluatorPort(Protocol):
    """A process of its own that evaluates one snapshot on an engine of its own, once."""

    async def evaluate(self) -> EvaluationReport:
        """Sample and score every held-out prompt; the samples are written, the report answered.

        Raises:
            EngineLost: the engine did not start, or ended; another evaluator may succeed.
            DigestMismatch: the engine holds other tensors than the snapshot recorded.
        """
        ...

    async def progress(self) -> StageProgress:
        """What it has done so far."""
        ...


OpenEvaluator = Callable[[BackgroundOrder], AbstractAsyncContextManager[EvaluatorPort]]
"""Starts an evaluator that ends with the context, and with the process that opened it."""
