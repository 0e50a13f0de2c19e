"""Tiny real runs on a Ray head of the test session's own."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from activities.loading import LoadOrder, load_engines
from activities.routing import route
from activities.site import Site
from activities.storage import layout
from activities.storage.commit import commit_checkpoint
from activities.storage.lease import Owner, claim_epoch
from activities.storage.store import Store
from activities.wire.client import EngineClient
from activities.wire.router_client import RouterClient
from configs.load import resolve_document
from models.checkpoint import CheckpointRef, PolicyClock
from models.ids import FenceToken, RunRef
from models.ports import ActorStatus
from models.publication import WeightsRef
from models.rollout import CollectRequest
from models.run import PrepareRequest
from models.update import UpdateReport
from workers.actors.order import actor_name
from workers.actors.preparation import prepare_run
from workers.fleet import RayFleet


def tiny_document(root: Path, name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run of seconds: 1 layer, width 64, copy a letter; a short warm-up makes rewards differ."""
    document: dict[str, Any] = {
        "schema_version": 1,
        "name": name,
        "model": {
            "source": "tiny",
            "tiny": {"hidden_size": 64, "num_layers": 1, "warmup_accuracy": 0.1},
        },
        "output": {"root": str(root)},
        "data": {
            "tasks": [
                {
                    "task": "reverse_word",
                    "train_count": 16,
                    "eval_count": 4,
                    "params": {"letters": 1},
                }
            ]
        },
        "training": {"num_rollouts": 8, "rollout_batch_size": 4, "samples_per_prompt": 8},
        "core": {"max_context_length": 64, "filter_zero_std_groups": False},
        "inference": {"dtype": "float32", "max_response_length": 3, "num_engines": 1},
    }
    for key, values in sections.items():
        document[key] = {**document.get(key, {}), **values}
    return document


class Run:
    """One run on disk, claimed; makes tokens and requests."""

    def __init__(self, root: Path, name: str, **sections: dict[str, Any]) -> None:
        loaded = resolve_document(tiny_document(root, name, **sections), origin="test")
        self.spec = loaded.spec
        self.store = Store(str(root))
        self.store.write_json(layout.RESOLVED_CONFIG, loaded.document)
        self.ref = RunRef(run_id=f"train/{name}", root=str(root), spec_sha256=loaded.sha256)
        self.epoch = self.claim()

    def prepare(self) -> None:
        """What the fleet finds made then: its own way starts a process that imports torch."""
        prepare_run(self.ref, self.spec)

    def claim(self) -> int:
        """Take the next epoch, as the start of a run or a rebuild does."""
        owner = Owner(run_id=self.ref.run_id, namespace="default", cluster_id="test")
        self.epoch = claim_epoch(self.store, owner)
        return self.epoch

    def token(self, update: int = 0, attempt: int = 1) -> FenceToken:
        return FenceToken(epoch=self.epoch, update=update, attempt=attempt)

    def request(self, **fields: Any) -> PrepareRequest:
        return PrepareRequest(run=self.ref, epoch=self.epoch, **fields)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Wait until ``condition`` holds; fails at the deadline."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


def kill(pid: int) -> None:
    """SIGKILL, and return when the process runs no more."""
    process = psutil.Process(pid)
    process.kill()
    deadline = time.monotonic() + 5
    with contextlib.suppress(psutil.NoSuchProcess):  # it may be reaped between two looks
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} survives SIGKILL"
            time.sleep(0.001)


def site_of(fleet: RayFleet) -> Site:
    """What activities work with, without a tracker."""
    return Site(fleet=fleet, tracker=NoTracker(), engine=EngineClient, router=RouterClient)


async def publish(fleet: RayFleet, run: Run, token: FenceToken, version: int) -> WeightsRef:
    """Export, load into every engine, route to all: what the publish activity does."""
    site = site_of(fleet)
    weights = await fleet.trainer(run.ref).export_weights(token, version)
    engines = await fleet.engines(run.ref)
    await load_engines(site, LoadOrder(run.ref, token, weights, 30.0), engines)
    await route(site, run.ref, token, engines, weights)
    return weights


async def update(fleet: RayFleet, run: Run, index: int) -> UpdateReport:
    """Collect and train one update of a sequential run."""
    request = CollectRequest(
        run=run.ref,
        epoch=run.epoch,
        update=index,
        policy_version=index,
        consumed_through=index - 1,
    )
    collection = await fleet.producer(run.ref).collect(run.token(index, 2), request)
    return await fleet.trainer(run.ref).optimize(run.token(index, 3), index, collection)


async def commit(fleet: RayFleet, run: Run, index: int) -> CheckpointRef:
    """Commit a checkpoint after update ``index``."""
    token = run.token(index + 1)
    cursor = await fleet.producer(run.ref).data_state(index)
    folder = layout.checkpoint_folder(index, token)
    files = await fleet.trainer(run.ref).save(token, folder)
    clock = PolicyClock(completed_steps=index + 1, published_step=index, next_rollout_id=index + 1)
    return commit_checkpoint(run.store, run.ref, token, clock, cursor, files, folder)


async def statuses(fleet: RayFleet, run: Run) -> dict[str, ActorStatus]:
    """Name -> status of every actor of the run."""
    rows = await fleet.status(run.ref)
    return {actor_name(row.role, row.rank): row for row in rows}


class NoTracker:
    """Keeps nothing."""

    def log(self, run: RunRef, metrics: Mapping[str, float]) -> None:
        """Nothing to do."""
