"""``snapshot``: the trainer's weights as a folder that outlives the fleet.

The weights are those that engines load, byte for byte, so an evaluation in background answers for
what the run itself serves. A folder appears by rename, complete: a killed attempt leaves a hidden
one that the next attempt removes.
"""

import asyncio
import secrets
from pathlib import Path

import structlog

from activities.background.receipts import COMPLETE, OPEN, receipts
from activities.heartbeat import beating
from activities.site import Site, store_of
from activities.storage import layout
from activities.storage.lease import require_epoch
from activities.storage.local_copy import put_folder
from activities.storage.store import Store
from activities.timing import timed
from models.background import EvaluationReceipt, SnapshotRef, SnapshotRequest
from models.errors import ConfigurationError, ContractViolation, PerdureError, TrainerLost
from models.evaluation import ReceiptStatus
from models.ids import FenceToken
from models.publication import WeightsRef

_STAGING = ".hf-"
_log = structlog.get_logger(__name__)


async def snapshot(site: Site, request: SnapshotRequest, token: FenceToken) -> SnapshotRef:
    """Store the current weights. A complete snapshot that a receipt names stays as it is.

    Raises:
        TrainerLost: the trainer is dead, or its export makes no progress.
        StaleFence: the token's epoch does not own the root any more.
        StorageFull: no space is left for it.
    """
    return await beating(_snapshot(site, request, token), f"snapshot {request.update}")


async def _snapshot(site: Site, request: SnapshotRequest, token: FenceToken) -> SnapshotRef:
    store = store_of(request.run)
    trainer = site.fleet.trainer(request.run)
    rollout_id = request.update - 1 if request.update else None
    async with timed(store, "evaluation_snapshot", rollout_id, {"update": request.update}):
        weights = await beating(
            trainer.export_weights(token, request.policy_version),
            f"snapshot {request.update}",
            trainer.progress,
            stalled=TrainerLost,
        )
        return await asyncio.to_thread(_take, store, request.update, weights, token)


def find_snapshot(store: Store, update: int) -> SnapshotRef | None:
    """The complete snapshot after ``update`` updates; None while there is none."""
    folder = layout.eval_snapshot(update)
    if store.exists(f"{folder}/{layout.SNAPSHOT_COMPLETE}"):
        return _facts(store, f"{folder}/{layout.SNAPSHOT_FACTS}")
    if store.exists(layout.eval_reference(update)):
        return _facts(store, layout.eval_reference(update))
    return None


def prune_snapshots(store: Store) -> list[str]:
    """Delete snapshots that nobody needs; returns their folders.

    The newest stays, and any whose evaluation is still to come or has failed and may be asked for
    again. Those that were evaluated, or skipped because another evaluation ran, go. What cannot be
    deleted is left with a warning.
    """
    found: dict[int, list[EvaluationReceipt]] = {}
    for _, receipt in receipts(store):
        found.setdefault(receipt.update, []).append(receipt)
    names = store.list(layout.EVAL_SNAPSHOTS)
    updates = sorted(int(name.rpartition("-")[2]) for name in names if name.startswith("update-"))
    removed = []
    for update in updates[:-1]:
        folder = layout.eval_snapshot(update)
        if not _is_needless(found.get(update, [])) or not store.exists(folder):
            continue
        try:
            _remove(store, update)
            removed.append(folder)
        except (PerdureError, OSError) as error:
            _log.warning("snapshot not deleted", folder=folder, reason=str(error))
    return removed


def _is_needless(found: list[EvaluationReceipt]) -> bool:
    """Whether no receipt of an update will ask for its snapshot again."""
    if any(receipt.status in OPEN and receipt.result is None for receipt in found):
        return False
    complete = any((receipt.result or {}).get("status") == COMPLETE for receipt in found)
    skipped = [receipt.status is ReceiptStatus.SKIPPED_BUSY for receipt in found]
    return complete or (bool(skipped) and all(skipped))


def _is_named(store: Store, update: int) -> bool:
    """Whether a receipt names the snapshot of ``update``, so that an evaluation may read it."""
    return any(
        receipt.update == update and receipt.snapshot is not None for _, receipt in receipts(store)
    )


def _remove(store: Store, update: int) -> None:
    """Delete a snapshot. The marker first: what is half deleted must not look complete."""
    folder = layout.eval_snapshot(update)
    store.remove_tree(f"{folder}/{layout.SNAPSHOT_COMPLETE}")
    store.remove_tree(folder.rpartition("/")[0])


def _take(store: Store, update: int, weights: WeightsRef, token: FenceToken) -> SnapshotRef:
    found = find_snapshot(store, update)
    if found is not None and (found.digest == weights.digest or _is_named(store, update)):
        return found
    require_epoch(store, token.epoch)
    if found is not None:
        _log.warning("snapshot of undone updates replaced", folder=found.folder)
        _remove(store, update)
    if update == 0:
        return _refer(store, weights)
    target = layout.eval_snapshot(update)
    reference = SnapshotRef(
        update=update,
        policy_version=weights.version,
        folder=target,
        digest=weights.digest,
        num_bytes=weights.num_bytes,
    )
    if store.is_local:
        staged = _stage(store, reference, weights)
        require_epoch(store, token.epoch)
        if store.exists(target):
            store.rename(target, f"{target}.incomplete-{secrets.token_hex(4)}")
        store.rename(staged, target)
    else:
        _upload(store, reference, weights, token)
    removed = prune_snapshots(store)
    _log.info("snapshot stored", folder=target, bytes=weights.num_bytes, removed=removed)
    return reference


def _refer(store: Store, weights: WeightsRef) -> SnapshotRef:
    """The initial weights are the prepared model; no copy is made."""
    reference = SnapshotRef(
        update=0,
        policy_version=weights.version,
        folder=layout.PREPARED_MODEL,
        digest=weights.digest,
        num_bytes=weights.num_bytes,
    )
    facts = {
        **reference.model_dump(mode="json"),
        "checkpoint": f"{store.root}/{layout.PREPARED_MODEL}",
        "reuse_initial_hf": True,
    }
    store.write_json(layout.eval_reference(0), facts)
    return reference


def _stage(store: Store, reference: SnapshotRef, weights: WeightsRef) -> str:
    """Fill a hidden folder beside the target; leftovers of other attempts go first."""
    parent = reference.folder.rpartition("/")[0]
    for name in store.list(parent, hidden=True):
        if name.startswith(_STAGING):
            store.remove_tree(f"{parent}/{name}")
    source = _readable(weights)
    staged = f"{parent}/{_STAGING}{secrets.token_hex(4)}"
    for path in sorted(source.iterdir()):
        store.put_file(path, f"{staged}/{path.name}")
    store.write_json(f"{staged}/{layout.SNAPSHOT_FACTS}", reference.model_dump(mode="json"))
    store.write_bytes(f"{staged}/{layout.SNAPSHOT_COMPLETE}", b"")
    return staged


def _upload(store: Store, reference: SnapshotRef, weights: WeightsRef, token: FenceToken) -> None:
    """An object store cannot rename: its marker is written last, by the root's owner alone."""
    store.remove_tree(reference.folder)
    put_folder(store, _readable(weights), reference.folder)
    facts = reference.model_dump(mode="json")
    store.write_json(f"{reference.folder}/{layout.SNAPSHOT_FACTS}", facts)
    require_epoch(store, token.epoch)
    store.write_bytes(f"{reference.folder}/{layout.SNAPSHOT_COMPLETE}", b"")


def _readable(weights: WeightsRef) -> Path:
    source = Path(weights.path)
    if not source.is_dir():
        raise ConfigurationError(
            f"the trainer's weights in {source} cannot be read by this worker; start the GPU "
            "worker on the trainer's host"
        )
    return source


def _facts(store: Store, rel: str) -> SnapshotRef:
    try:
        return SnapshotRef.model_validate(store.read_json(rel))
    except ValueError as error:
        raise ContractViolation(f"{store.root}/{rel} does not describe a snapshot") from error
