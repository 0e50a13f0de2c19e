"""``checkpoint``: data position, trainer state, marker; in this order, inference going on."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import structlog

from activities.healing import beside_healing
from activities.heartbeat import beating
from activities.site import Site, spec_of, store_of
from activities.storage import layout
from activities.storage.commit import commit_checkpoint, newest_checkpoint, read_marker, retain
from activities.storage.store import Store
from activities.timing import timed
from configs.core import CoreSection
from models.checkpoint import CheckpointRef, CheckpointRequest, PolicyClock
from models.ids import FenceToken

_log = structlog.get_logger(__name__)


async def checkpoint(site: Site, request: CheckpointRequest, token: FenceToken) -> CheckpointRef:
    """Commit everything up to ``request.update`` and delete what need not be kept.

    A repeated call finds what an earlier attempt committed. ``StorageFull`` leaves the previous
    checkpoint the newest one, so the run can be resumed from it. The timing row's details tell when
    the trainer wrote, ``trainer_write: {started_unix, seconds}``: engines serve meanwhile, and in a
    fully async run they are kept alive, see ``healing.beside_healing``.
    """
    return await beating(_checkpoint(site, request, token), f"checkpoint {request.update}")


async def _checkpoint(site: Site, request: CheckpointRequest, token: FenceToken) -> CheckpointRef:
    store = store_of(request.run)
    spec = await asyncio.to_thread(spec_of, request.run)
    details: dict[str, Any] = {}

    def save() -> Awaitable[CheckpointRef]:
        return _commit_and_retain(site, store, request, token, spec.core, details)

    async with (
        site.reports.flowing(request.run, site.fleet.producer(request.run), site.tracker),
        timed(store, "checkpoint", request.update, details),
    ):
        return await beside_healing(site, request.run, token, spec, save)


async def _commit_and_retain(
    site: Site,
    store: Store,
    request: CheckpointRequest,
    token: FenceToken,
    core: CoreSection,
    details: dict[str, Any],
) -> CheckpointRef:
    reference = await asyncio.to_thread(_committed_already, store, request)
    if reference is None:
        reference = await _commit(site, store, request, token, details)
    keep_last, keep_every = core.checkpoint_keep_last, core.checkpoint_keep_every
    deleted = await asyncio.to_thread(retain, store, keep_last, keep_every, reference)
    _log.info("checkpoint committed", folder=reference.folder, deleted=deleted)
    return reference


async def _commit(
    site: Site,
    store: Store,
    request: CheckpointRequest,
    token: FenceToken,
    details: dict[str, Any],
) -> CheckpointRef:
    cursor = await site.fleet.producer(request.run).data_state(request.update)
    folder = layout.checkpoint_folder(request.update, token)
    started_unix, started = time.time(), time.monotonic()
    files = await site.fleet.trainer(request.run).save(token, folder)
    details["trainer_write"] = {
        "started_unix": started_unix,
        "seconds": time.monotonic() - started,
    }
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
