"""Committing a collection: Parquet first, manifest last. Without a manifest it does not exist."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from activities.fencing import FenceGuard
from activities.rollout.advantages import group_advantages
from activities.rollout.collection_file import read_collection, write_collection
from activities.rollout.flow import append_flow, flow_row
from activities.rollout.source import PromptSource
from activities.rollout.summary import SampledTally, collection_counts, collection_metrics
from activities.storage.layout import collection_manifest, collection_parquet
from activities.storage.store import Store
from configs.run import RunSpec
from models.ids import FenceToken
from models.rollout import CollectionManifest, CollectRequest, DroppedGroup, RolloutCollection
from models.sample import SampleGroup


@dataclass(frozen=True, slots=True)
class CollectionDraft:
    """What a collection will hold and name. Groups and dropped ones are in hand-out order."""

    groups: list[SampleGroup]
    dropped: list[DroppedGroup]
    tally: SampledTally
    max_requeues: int
    """Most requeues of any kept draw."""
    started: float
    """When its sampling began, on the monotonic clock."""
    queue_metrics: Mapping[str, float] = field(default_factory=dict)
    wait_seconds: float | None = None
    """Of a fully async run: how long the collection waited for its groups."""

    @property
    def group_indices(self) -> list[int]:
        """Every group that the collection accounts for, dropped ones included."""
        kept = [group.group_index for group in self.groups]
        return kept + [each.draw.group_index for each in self.dropped]


class CollectionWriter:
    """Writes collections of one run and finds those that were written before."""

    def __init__(
        self, spec: RunSpec, store: Store, source: PromptSource, epochs: FenceGuard
    ) -> None:
        self._std_normalization = spec.training.grpo_std_normalization
        inference = spec.inference
        self._num_devices = inference.num_engines * inference.tensor_parallel_size
        self._store = store
        self._source = source
        self._epochs = epochs

    async def find(self, request: CollectRequest) -> CollectionManifest | None:
        """The committed collection of this update and epoch, if there is one."""
        return await asyncio.to_thread(self._read, request)

    async def read(self, manifest: CollectionManifest) -> list[SampleGroup]:
        """The groups of a committed collection.

        Raises:
            DigestMismatch: the file is not the one that was committed.
        """
        return await asyncio.to_thread(read_collection, self._store, manifest.collection)

    def adopt(
        self, update: int, manifest: CollectionManifest, groups: list[SampleGroup]
    ) -> RolloutCollection:
        """Take over a collection that an earlier life of this producer committed."""
        dropped = [each.draw for each in manifest.dropped]
        self._source.adopt(update, groups, manifest.data_after, dropped)
        return manifest.collection

    async def commit(self, request: CollectRequest, draft: CollectionDraft) -> RolloutCollection:
        """Assign the draft's groups to the update and write the collection.

        On any error they stay assigned; the caller takes them back.
        """
        for group in draft.groups:
            group.advantages = group_advantages(group.rewards, self._std_normalization)
        self._source.assign(request.update, draft.group_indices)
        data_after = self._source.snapshot(request.update)
        uri = collection_parquet(request.update, request.epoch)
        sha256 = await asyncio.to_thread(write_collection, self._store, uri, draft.groups)
        collection = await asyncio.to_thread(
            _collection, request, draft, uri, sha256, self._num_devices
        )
        manifest = CollectionManifest(
            collection=collection, data_after=data_after, dropped=tuple(draft.dropped)
        )
        self._epochs.admit(FenceToken(epoch=request.epoch, update=0, attempt=0))
        await asyncio.to_thread(self._write, request, draft, manifest)
        return collection

    def _read(self, request: CollectRequest) -> CollectionManifest | None:
        rel = collection_manifest(request.update, request.epoch)
        if not self._store.exists(rel):
            return None
        return CollectionManifest.model_validate(self._store.read_json(rel))

    def _write(
        self, request: CollectRequest, draft: CollectionDraft, manifest: CollectionManifest
    ) -> None:
        if draft.wait_seconds is not None:
            row = flow_row(
                request.update,
                draft.groups,
                wait_seconds=draft.wait_seconds,
                queue_metrics=draft.queue_metrics,
            )
            append_flow(self._store, row)
        rel = collection_manifest(request.update, request.epoch)
        self._store.write_json(rel, manifest.model_dump(mode="json"))


def _collection(
    request: CollectRequest, draft: CollectionDraft, uri: str, sha256: str, num_devices: int
) -> RolloutCollection:
    seconds = time.monotonic() - draft.started
    counts = collection_counts(draft.groups, draft.tally)
    metrics = collection_metrics(
        request.update,
        draft.groups,
        counts,
        draft.tally,
        draft.max_requeues,
        seconds,
        num_devices,
        draft.queue_metrics,
    )
    return RolloutCollection(
        update=request.update,
        epoch=request.epoch,
        uri=uri,
        sha256=sha256,
        counts=counts,
        reward_mean=draft.tally.reward_mean,
        min_version=int(metrics["rollout/weight_version/min"]),
        max_version=int(metrics["rollout/weight_version/max"]),
        seconds=seconds,
        metrics=metrics,
    )
