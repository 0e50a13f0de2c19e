"""``checkpoint``: data position, trainer state, marker; in this order, inference going on."""

import asyncio

import structlog

from activities.heartbeat import beating
from activities.site import Site, spec_of, store_of
from activities.storage import layout
from activities.storage.commit import commit_checkpoint, newest_checkpoint, read_marker, retain
from activities.storage.store import Store
from activities.timing import timed
from models.checkpoint import CheckpointRef, CheckpointRequest, PolicyClock
from models.ids import FenceToken

_log = structlog.get_logger(__name__)


async def checkpoint(site: Site, request: CheckpointRequest, token: FenceToken) -> CheckpointRef:
    """Commit everything up to ``request.update`` and delete what need not be kept.

    A repeated call finds what an earlier attempt committed. ``StorageFull`` leaves the previous
    checkpoint the newest one, so the run can be resumed from it.
    """
    store = store_of(request.run)
    spec = await asyncio.to_thread(spec_of, request.run)
    async with timed(store, "checkpoint", request.update):
        return await beating(
            _commit_and_retain(
                site,
                store,
                request,
                token,
                spec.core.checkpoint_keep_last,
                spec.core.checkpoint_keep_every,
            ),
            f"checkpoint {request.update}",
        )


async def _commit_and_retain(
    site: Site,
    store: Store,
    request: CheckpointRequest,
    token: FenceToken,
    keep_last: int | None,
    keep_every: int | None,
) -> CheckpointRef:
    reference = await asyncio.to_thread(_committed_already, store, request)
    if reference is None:
        reference = await _commit(site, store, request, token)
    deleted = await asyncio.to_thread(retain, store, keep_last, keep_every, reference)
    _log.info("checkpoint committed", folder=reference.folder, deleted=deleted)
    return reference


async def _commit(
    site: Site, store: Store, request: CheckpointRequest, token: FenceToken
) -> CheckpointRef:
    cursor = await site.fleet.producer(request.run).data_state(request.update)
    folder = layout.checkpoint_folder(request.update, token)
    files = await site.fleet.trainer(request.run).save(token, folder)
    clock = PolicyClock(
        completed_steps=request.policy_version,
        published_step=request.policy_version,
        next_rollout_id=request.update + 1,
    )
    return await asyncio.to_thread(
        commit_checkpoint, store, request.run, token, clock, cursor, files, folder
    )


def _committed_already(store: Store, request: CheckpointRequest) -> CheckpointRef | None:
    """What an attempt of this same request committed before its answer was lost."""
    newest = newest_checkpoint(store)
    if newest is None or newest.update != request.update:
        return None
    same = read_marker(store, newest).epoch == request.epoch
    return newest if same and newest.policy_version == request.policy_version else None
