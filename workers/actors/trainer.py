"""The trainer actor: a thin Ray shell around ``workers.trainers.guarded.GuardedTrainer``.

With ``trainer.num_processes`` above 1 it is rank 0, and the other ranks are its child processes on
the same host; a trainer over several hosts is not there yet. The end of one rank is the actor's.

Two concurrency groups: ``work`` has one thread, so mutating calls never overlap and torch always
computes in the same thread; ``peek`` answers during one.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import structlog

from activities.publication_trace import PublicationTrace, diagnostics_wanted
from activities.site import spec_of, store_of
from activities.storage import layout
from activities.storage.local_copy import local_folder
from models.checkpoint import CheckpointFile, PolicyClock
from models.errors import ContractViolation, PerdureError, StaleFence, TrainerLost
from models.evaluation import ExportReport
from models.ids import FenceToken
from models.ports import EngineHandle, RankEvent, StageProgress
from models.publication import WeightBucket, WeightChannel, WeightsOffer, WeightsRef
from models.rollout import RolloutCollection
from models.update import UpdateReport
from workers.actors.garbage import freeze_living_objects
from workers.actors.order import (
    ActorFacts,
    ActorOrder,
    describe,
    enter,
    inherited,
    num_cores,
    trainer_threads,
    visible_gpus,
)
from workers.actors.server import LOGS
from workers.compiler_cache.transfer import compiler_cache

if TYPE_CHECKING:
    from activities.storage.store import Store
    from workers.trainers.gang import Gang
    from workers.trainers.guarded import GuardedTrainer
    from workers.trainers.local import LocalTrainer
    from workers.trainers.ranks import Ranks

CONCURRENCY_GROUPS = {"work": 1, "peek": 2}
FAREWELL_S = 1.0
"""After the loss of a rank the running call may still say so; then the actor ends."""
RECORD_S = 5.0
"""For the loss to be written down; on a root that takes longer it goes unrecorded."""

_log = structlog.get_logger(__name__)


class TrainerActor:
    """Sync actor. Nothing heavy happens before ``start``."""

    def __init__(self, order: ActorOrder) -> None:
        self._order = order
        self._spec = spec_of(order.run)
        enter(order, self._spec, trainer_threads(self._spec, num_cores()))
        self._trainer: LocalTrainer | None = None
        self._guarded: GuardedTrainer | None = None
        self._gang: Gang | None = None
        self._started: tuple[int, str | None, PolicyClock | None] | None = None
        self._broken = False
        self._cache = compiler_cache("trainer", os.environ)

    @ray.method(concurrency_group="work")
    def start(self, epoch: int, folder: str | None, clock: PolicyClock | None) -> ActorFacts:
        """Load the prepared model, or the checkpoint in ``folder`` (relative) at ``clock``.

        Epochs before ``epoch`` are refused. No update of it is fenced yet: the run may go on at an
        earlier one than it had reached. A repeated call finds it done and changes nothing.
        """
        asked = (epoch, folder, clock)
        if self._started is None:
            if self._cache is not None:
                self._report_cache(self._cache.restore())
            self._set_up(*asked)
            self._started = asked
        elif asked != self._started:
            raise ContractViolation(
                f"the trainer of {self._order.run.run_id} was started with (epoch, folder, clock) "
                f"{self._started} and cannot start again with {asked}"
            )
        return self.facts()

    @ray.method(concurrency_group="work")
    def optimize(
        self, token: FenceToken, update: int, collection: RolloutCollection
    ) -> UpdateReport:
        """See ``TrainerPort.optimize``."""
        settled = False
        try:
            report = self._ready().optimize(token, update, collection)
            settled = True
            if self._cache is not None:
                self._cache.publish_if_due(self._report_cache)
            return report
        except (StaleFence, ContractViolation):
            settled = True
            raise
        finally:
            # Otherwise the weights may lie between two optimizer steps: no rebuild may keep them.
            self._broken |= not settled

    @ray.method(concurrency_group="work")
    def export_weights(self, token: FenceToken, version: int) -> WeightsRef:
        """See ``TrainerPort.export_weights``."""
        with self._told("trainer_export", version):
            return self._ready().export_weights(token, version)

    @ray.method(concurrency_group="work")
    def offer_weights(self, token: FenceToken, version: int) -> WeightsOffer:
        """See ``TrainerPort.offer_weights``."""
        with self._told("trainer_offer", version):
            return self._ready().offer_weights(token, version)

    @ray.method(concurrency_group="work")
    def keep_offered(self, token: FenceToken, version: int) -> None:
        """See ``TrainerPort.keep_offered``."""
        with self._told("trainer_copy", version):
            self._ready().keep_offered(token, version)

    @ray.method(concurrency_group="work")
    def pack_bucket(self, token: FenceToken, version: int, index: int) -> WeightBucket:
        """See ``TrainerPort.pack_bucket``."""
        with self._told("trainer_pack", version, bucket=index):
            return self._ready().pack_bucket(token, version, index)

    @ray.method(concurrency_group="work")
    def drop_bucket(self, token: FenceToken) -> None:
        """See ``TrainerPort.drop_bucket``."""
        self._ready().drop_bucket(token)

    @ray.method(concurrency_group="work")
    def open_channel(
        self, token: FenceToken, engines: tuple[EngineHandle, ...], timeout_s: float
    ) -> WeightChannel:
        """See ``TrainerPort.open_channel``."""
        return self._ready().open_channel(token, engines, timeout_s)

    @ray.method(concurrency_group="work")
    def connect_channel(self, token: FenceToken, name: str) -> None:
        """See ``TrainerPort.connect_channel``."""
        self._ready().connect_channel(token, name)

    @ray.method(concurrency_group="work")
    def broadcast_bucket(self, token: FenceToken, version: int, index: int, name: str) -> None:
        """See ``TrainerPort.broadcast_bucket``."""
        with self._told("trainer_broadcast", version, bucket=index):
            self._ready().broadcast_bucket(token, version, index, name)

    @ray.method(concurrency_group="work")
    def save(self, token: FenceToken, folder: str) -> tuple[CheckpointFile, ...]:
        """See ``TrainerPort.save``."""
        return self._ready().save(token, folder)

    @ray.method(concurrency_group="work")
    def export(self, token: FenceToken, uri: str) -> ExportReport:
        """See ``TrainerPort.export``."""
        return self._ready().export(token, uri)

    @ray.method(concurrency_group="work")
    def close(self) -> None:
        """Remove exported weights, after the running call."""
        if self._guarded is not None:
            self._guarded.close()

    @ray.method(concurrency_group="work")
    def publish_cache(self) -> dict[str, Any] | None:
        """Publish what was compiled; what became of it, or none without a cache. Never raises."""
        return None if self._cache is None else self._cache.publish()

    @ray.method(concurrency_group="work")
    def settled(self) -> ActorFacts:
        """``facts`` after every call that was made before this one."""
        return self.facts()

    @ray.method(concurrency_group="peek")
    def exported(self) -> WeightsRef | None:
        """See ``TrainerPort.exported``."""
        return self._ready().exported()

    @ray.method(concurrency_group="peek")
    def kept(self, version: int) -> WeightsRef | None:
        """See ``TrainerPort.kept``."""
        return self._ready().kept(version)

    @ray.method(concurrency_group="peek")
    def progress(self) -> StageProgress:
        """See ``TrainerPort.progress``."""
        if self._guarded is None:
            return StageProgress(stage="load model")
        return self._guarded.progress()

    @ray.method(concurrency_group="peek")
    def revoke(self, epoch: int) -> None:
        """Refuse every token of ``epoch`` and below, also while a call runs."""
        self._ready().revoke(epoch)

    @ray.method(concurrency_group="peek")
    def facts(self) -> ActorFacts:
        """Who this is and where it stands."""
        trainer = self._trainer
        if trainer is None:
            return describe(self._order)
        last = trainer.last_report
        return describe(
            self._order,
            serving=not self._broken and (self._gang is None or self._gang.alive),
            next_update=trainer.next_update,
            last_batch_sha256=last.batch_sha256 if last else None,
            policy_version=trainer.policy_version,
        )

    def _set_up(self, epoch: int, folder: str | None, clock: PolicyClock | None) -> None:
        store = store_of(self._order.run)
        try:
            ranks = self._join(store)
            trainer, guarded = self._load(store, ranks)
            if folder is not None and clock is not None:
                guarded.restore(FenceToken(epoch=epoch, update=0, attempt=0), folder, clock)
        except BaseException:
            if self._gang is not None:
                self._gang.close()
            raise
        guarded.revoke(epoch - 1)
        freeze_living_objects()
        self._trainer, self._guarded = trainer, guarded

    def _load(self, store: "Store", ranks: "Ranks") -> "tuple[LocalTrainer, GuardedTrainer]":
        """The prepared model, on every rank."""
        from workers.trainers.contract_file import ContractFile
        from workers.trainers.guarded import GuardedTrainer
        from workers.trainers.local import LocalTrainer
        from workers.trainers.ranks import concluded

        with concluded(ranks):
            model_dir = local_folder(store, layout.PREPARED_MODEL)
            trainer = LocalTrainer(self._spec, model_dir, ContractFile(store), ranks)
        return trainer, GuardedTrainer(trainer, store, self._gang)

    def _join(self, store: "Store") -> "Ranks":
        """Start the other ranks, if there are any, and meet them."""
        from workers.trainers.gang import Gang, RankOrder
        from workers.trainers.process_ranks import join_ranks
        from workers.trainers.ranks import SingleRank

        section, scratch = self._spec.trainer, Path(self._order.scratch)
        if section.num_processes == 1:
            return SingleRank()
        order = RankOrder(
            run=self._order.run,
            rank=0,
            world=section.num_processes,
            rendezvous=str(scratch / f"trainer-ranks.{secrets.token_hex(8)}"),
            timeout_s=section.collective_timeout_s * self._order.timeout_factor,
        )
        logs = store.local_path(LOGS) if store.is_local else scratch
        # enter() has set this process's environment: the other ranks compute in the same
        self._gang = Gang.start(order, inherited({}), logs, self._end_with_rank)
        for rank, pid in enumerate(self._gang.pids, start=1):
            self._record_rank(rank, pid=pid)
        return join_ranks(Path(order.rendezvous), 0, order.world, order.timeout_s)

    @contextmanager
    def _told(self, step: str, version: int, **details: object) -> Iterator[None]:
        """With publication diagnostics, log the step and, while it hangs, every thread's stack."""
        trace = PublicationTrace(version, verbose=diagnostics_wanted(self._spec.launch.env))
        gpus = visible_gpus(self._order)
        with trace.watched(), trace.step(step, gpus=gpus, **details):
            yield

    def _report_cache(self, row: dict[str, Any]) -> None:
        self._note(layout.COMPILER_CACHE, row)

    def _record_rank(self, rank: int, *, pid: int | None = None, ended: str = "") -> None:
        event = RankEvent(
            incarnation=self._order.incarnation,
            rank=rank,
            host=socket.gethostname(),
            time_unix=time.time(),
            pid=pid,
            ended=ended,
        )
        self._note(layout.TRAINER_RANKS, event.model_dump(mode="json"))

    def _note(self, file: str, row: dict[str, Any]) -> None:
        """Best effort: the trainer does not depend on what people read about it."""
        try:
            store_of(self._order.run).append_jsonl(file, row)
        except (OSError, PerdureError) as error:
            _log.warning("not recorded", file=file, reason=str(error))

    def _end_with_rank(self, rank: int, reason: str) -> None:
        """A rank is lost: this process ends, wherever its other threads are."""
        _log.error("the trainer ends with its rank", reason=reason)
        leave = time.monotonic() + FAREWELL_S
        record = partial(self._record_rank, rank, ended=reason)
        recording = threading.Thread(target=record, name="last-words", daemon=True)
        recording.start()
        recording.join(RECORD_S)
        threading.Event().wait(max(0.0, leave - time.monotonic()))
        os._exit(1)

    def _ready(self) -> "GuardedTrainer":
        if self._guarded is None:
            raise TrainerLost(f"the trainer of {self._order.run.run_id} has not finished starting")
        return self._guarded
