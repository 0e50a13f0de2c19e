"""The trainer behind its fence: who may call, what was applied already, where files go.

One lock covers admission and mutation, so a token is compared atomically with what it allows. A
repeated call waits for the running one and is answered from its record; ``exported`` and
``progress`` never wait.
"""

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from activities.fencing import FenceGuard
from activities.storage import layout
from activities.storage.atomic import storage_errors
from activities.storage.host_cache import transfer_folder
from activities.storage.local_copy import download, has_folder, local_folder, put_folder
from activities.storage.store import Store
from models.checkpoint import CheckpointFile, CheckpointMarker, PolicyClock
from models.errors import ContractViolation, ServiceUnreachable
from models.evaluation import ExportReport
from models.ids import FenceToken
from models.ports import EngineHandle, StageProgress
from models.publication import WeightBucket, WeightChannel, WeightsOffer, WeightsRef
from models.rollout import RolloutCollection
from models.update import UpdateReport
from workers.sources.prompts import load_prompts
from workers.trainers.channel import Channel
from workers.trainers.commands import (
    Command,
    CopyWeights,
    DropBucket,
    ExportModel,
    ExportWeights,
    Load,
    OfferWeights,
    Optimize,
    PackBucket,
    Save,
)
from workers.trainers.export import ExportProbe
from workers.trainers.gang import Gang
from workers.trainers.local import LocalTrainer
from workers.trainers.weights import own_exports

T = TypeVar("T")

_UPLOADING = ".uploading"
"""First object of an export on an object store: so an upload that broke off is known as ours."""
_KEPT_EXPORTS = 2  # engines may still be reading the one before the newest


class GuardedTrainer:
    """Fence, idempotency and file placement around a trainer. All methods block."""

    def __init__(self, trainer: LocalTrainer, store: Store, gang: Gang | None = None) -> None:
        """``gang``: the trainer's other ranks; they are told of everything that is admitted."""
        self._gang = gang
        self._trainer = trainer
        self._store = store
        self._fence = FenceGuard("trainer")
        self._lock = threading.Lock()
        self._exports: list[WeightsRef] = []
        self._exports_lock = threading.Lock()
        self._copied: tuple[WeightsRef, Path] | None = None
        """What was offered and is copied, and where its folder goes."""
        self._copy_lock = threading.Lock()
        self._export_base: Path | None = None
        self._channel: Channel | None = None
        self._final_exports: dict[tuple[str, int], ExportReport] = {}

    @property
    def next_update(self) -> int:
        """Index of the update that may be applied next."""
        return self._trainer.next_update

    @property
    def policy_version(self) -> int:
        """Completed optimizer steps."""
        return self._trainer.policy_version

    def progress(self) -> StageProgress:
        """What the running call has done so far."""
        return self._trainer.progress()

    def exported(self) -> WeightsRef | None:
        """The newest export, also while an update runs."""
        exports = self._exports
        return exports[-1] if exports else None

    def revoke(self, epoch: int) -> None:
        """Refuse every token of ``epoch`` and below from now on, also those that wait."""
        self._fence.revoke(epoch)

    def optimize(
        self, token: FenceToken, update: int, collection: RolloutCollection
    ) -> UpdateReport:
        """Apply ``update`` once; the same (update, digest) again returns the same report.

        Raises:
            StaleFence: a newer token owns the trainer, or the epoch is revoked.
            ContractViolation: the update was applied with another collection, or is not the next.
        """
        with self._lock:
            self._fence.admit(token)
            last = self._trainer.last_report
            if last is not None and last.update == update:
                if last.batch_sha256 == collection.sha256:
                    return last
                raise ContractViolation(
                    f"update {update} was applied with collection {last.batch_sha256}, it cannot "
                    f"be applied again with {collection.sha256}"
                )
            if update != self._trainer.next_update or collection.update != update:
                raise ContractViolation(
                    f"update {update} with the collection of update {collection.update} asked for, "
                    f"the trainer's next update is {self._trainer.next_update}"
                )
            return self._lead(Optimize(update=update, collection=collection))

    def export_weights(self, token: FenceToken, version: int) -> WeightsRef:
        """Write the weights of ``version`` for engines; the two newest exports are kept."""
        with self._lock:
            self._fence.admit(token)
            newest = self.exported()
            if newest is not None and newest.version == version and newest.on_disk:
                return newest
            written = self.kept(version)
            if written is not None:
                return written
            folder = self._folder_of(version)
            with storage_errors(str(folder)):
                ref = self._lead(ExportWeights(version=version, folder=str(folder)))
            self._keep(ref)
            return ref

    def offer_weights(self, token: FenceToken, version: int) -> WeightsOffer:
        """Describe the weights of ``version`` for engines that take them in buckets.

        A single bucket is packed.
        """
        with self._lock:
            self._fence.admit(token)
            ref = self.exported()
            if ref is None or ref.version != version:
                ref = self._lead(OfferWeights(version=version))
                self._keep(ref)
            if ref.num_buckets != 1:
                return WeightsOffer(weights=ref)
            return WeightsOffer(
                weights=ref, bucket=self._lead(PackBucket(version=version, index=0))
            )

    def keep_offered(self, token: FenceToken, version: int) -> None:
        """Copy the weights that were offered to the host, for ``kept``.

        Raises:
            ContractViolation: the weights of ``version`` are not those that were offered last.
        """
        with self._lock:
            self._fence.admit(token)
            offered = self.exported()
            if offered is None or offered.version != version:
                raise ContractViolation(
                    f"weights of version {version} are to be kept, offered are "
                    f"{'none' if offered is None else offered.version}"
                )
            if offered.on_disk or (self._copied is not None and self._copied[0] == offered):
                return
            with self._copy_lock:
                self._copied = None
                self._lead(CopyWeights(version=version))
                self._copied = offered, self._folder_of(version)

    def kept(self, version: int) -> WeightsRef | None:
        """A folder of the weights that were copied, written at the first call; also in an update.

        None when the weights of ``version`` are neither a folder nor copied.

        Raises:
            StorageFull, ConfigurationError: it cannot be written.
        """
        with self._copy_lock:
            for known in self._exports:
                if known.version == version and known.on_disk:
                    return known
            if self._copied is None or self._copied[0].version != version:
                return None
            offered, folder = self._copied
            self._trainer.copy.write(self._trainer.model_dir, folder)
            written: WeightsRef = offered.model_copy(
                update={"path": str(folder), "transport": "disk", "num_buckets": 0}
            )
            self._keep(written)
            return written

    def pack_bucket(self, token: FenceToken, version: int, index: int) -> WeightBucket:
        """Fill one bucket; its memory is kept until the next one, or ``drop_bucket``."""
        with self._lock:
            self._fence.admit(token)
            return self._lead(PackBucket(version=version, index=index))

    def drop_bucket(self, token: FenceToken) -> None:
        """Give up the bucket that is packed, if there is one."""
        with self._lock:
            self._fence.admit(token)
            self._lead(DropBucket())

    def open_channel(
        self, token: FenceToken, engines: Sequence[EngineHandle], timeout_s: float
    ) -> WeightChannel:
        """The group for broadcasts to exactly these engines: the one that is connected, or a new.

        ``timeout_s``: seconds for its members to meet, and for each broadcast.
        """
        with self._lock:
            self._fence.admit(token)
            known = self._channel
            if known is not None and known.serves(engines):
                return known.info
            self._close_channel()
            self._channel = Channel(engines, timeout_s)
            return self._channel.info

    def connect_channel(self, token: FenceToken, name: str) -> None:
        """Meet the engines in the group ``name``; they must be on their way.

        Raises:
            ServiceUnreachable: one does not come.
        """
        with self._lock:
            self._fence.admit(token)
            with self._opened(name) as channel:
                channel.connect()

    def broadcast_bucket(self, token: FenceToken, version: int, index: int, name: str) -> None:
        """Send the bucket that is packed to every engine in the group ``name``.

        Raises:
            ServiceUnreachable: an engine does not take it; the group is of no use any more.
        """
        with self._lock:
            self._fence.admit(token)
            with self._opened(name) as channel:
                channel.broadcast(self._trainer.sender.flat(version, index))

    def save(self, token: FenceToken, folder: str) -> tuple[CheckpointFile, ...]:
        """Write the trainer's state into ``folder`` (relative to the root)."""
        with self._lock:
            self._fence.admit(token)
            with storage_errors(folder):
                if self._store.is_local:
                    return self._lead(Save(folder=str(self._store.local_path(folder))))
                with transfer_folder() as scratch:
                    files = self._lead(Save(folder=str(scratch)))
                    for file in files:
                        self._store.put_file(scratch / file.path, f"{folder}/{file.path}")
                    return files

    def restore(self, token: FenceToken, folder: str, clock: PolicyClock) -> None:
        """Load the committed checkpoint in ``folder``; exports of other weights are dropped."""
        with self._lock:
            self._fence.admit(token)
            self._drop_exports()
            if self._store.is_local:
                self._lead(Load(folder=str(self._store.local_path(folder)), clock=clock))
                return
            marker = CheckpointMarker.model_validate(
                self._store.read_json(f"{folder}/{layout.COMPLETE}")
            )
            with transfer_folder() as scratch:
                download(self._store, folder, marker.files, scratch)
                self._lead(Load(folder=str(scratch), clock=clock))

    def export(self, token: FenceToken, uri: str) -> ExportReport:
        """Write the Hugging Face folder ``uri`` (relative to the root), re-load and compare it."""
        with self._lock:
            self._fence.admit(token)
            key = (uri, self._trainer.policy_version)
            if key not in self._final_exports:
                with storage_errors(uri):
                    self._final_exports[key] = self._export(uri)
            return self._final_exports[key]

    def close(self) -> None:
        """Remove this process's exports and end the other ranks."""
        with self._lock:
            self._close_channel()
            if self._gang is not None:
                self._gang.close()
            self._drop_exports()
            if self._export_base is not None:
                shutil.rmtree(self._export_base, ignore_errors=True)
                self._export_base = None

    def _lead(self, command: Command[T]) -> T:
        """Do what was admitted, with all ranks."""
        if self._gang is None:
            return command.run(self._trainer, self._store)
        with self._gang.told(command.model_dump_json()):
            return command.run(self._trainer, self._store)

    def _folder_of(self, version: int) -> Path:
        """Below this process's folder, which is chosen once: it must hold the kept and a new."""
        if self._export_base is None:
            needed = (_KEPT_EXPORTS + 1) * self._trainer.copy.num_bytes
            self._export_base = own_exports(self._store.root, needed)
        return self._export_base / f"v{version:07d}"

    def _export(self, uri: str) -> ExportReport:
        probe = self._probe()
        if self._store.is_local:
            folder = self._store.local_path(uri)
            return self._lead(ExportModel(folder=str(folder), probe=probe, uri=uri))
        if has_folder(self._store, uri):
            finished = local_folder(self._store, uri)
            return self._lead(ExportModel(folder=str(finished), probe=probe, uri=uri))
        self._clear_for_upload(uri)
        with transfer_folder() as scratch:
            folder = scratch / "hf"
            report = self._lead(ExportModel(folder=str(folder), probe=probe, uri=uri))
            put_folder(self._store, folder, uri)
            return report

    def _clear_for_upload(self, uri: str) -> None:
        """Remove an upload that broke off, but for the mark that says so; refuse what is none."""
        left = self._store.list(uri, hidden=True)
        if left and _UPLOADING not in left:
            raise ContractViolation(
                f"{self._store.root}/{uri} exists and is not a finished export; remove it first"
            )
        self._store.write_bytes(f"{uri}/{_UPLOADING}", b"")
        for name in left:
            if name != _UPLOADING:
                self._store.remove_tree(f"{uri}/{name}")

    def _probe(self) -> ExportProbe:
        """The first held-out prompt, else the first training prompt."""
        prompts = load_prompts(self._store, "eval") or load_prompts(self._store, "train")
        first = prompts[0]
        return ExportProbe(
            prompt_ids=first.prompt_token_ids,
            question=first.metadata.query,
            max_new_tokens=self._trainer.spec.inference.max_response_length,
        )

    @contextmanager
    def _opened(self, name: str) -> Iterator[Channel]:
        """The group ``name``; given up when the block fails."""
        channel = self._channel
        if channel is None or channel.info.name != name:
            raise ContractViolation(f"there is no group {name}: it failed, or another was opened")
        try:
            yield channel
        except ServiceUnreachable:
            self._close_channel()
            raise

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _keep(self, ref: WeightsRef) -> None:
        """Remember an export; folders but those of the two newest are removed."""
        with self._exports_lock:
            known = {each.version: each for each in self._exports} | {ref.version: ref}
            kept = [known[version] for version in sorted(known)]
            self._exports = kept[-_KEPT_EXPORTS:]
        _remove(kept[:-_KEPT_EXPORTS])

    def _drop_exports(self) -> None:
        with self._copy_lock:
            self._copied = None
            exports, self._exports = self._exports, []
        _remove(exports)


def _remove(exports: Sequence[WeightsRef]) -> None:
    """Remove the folders of those that have one."""
    for ref in exports:
        if ref.on_disk:
            shutil.rmtree(ref.path, ignore_errors=True)
