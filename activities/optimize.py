"""``optimize``: one update on one collection, applied once however often it is asked for."""

import asyncio
from collections.abc import Awaitable

from activities.healing import beside_healing
from activities.heartbeat import beating
from activities.rows import append_metrics, rollout_metrics, train_metrics
from activities.site import Site, spec_of, store_of
from activities.storage import layout
from activities.storage.store import Store
from activities.timing import timed
from activities.turns import give_memory_to_trainer
from models.errors import TrainerLost
from models.ids import FenceToken
from models.update import OptimizeRequest, UpdateReport


async def optimize(site: Site, request: OptimizeRequest, token: FenceToken) -> UpdateReport:
    """Train ``request.update``; rows are written once the trainer has reported.

    Colocated engines give their memory to the trainer before.
    In a fully async run engines are kept alive meanwhile, see ``healing.beside_healing``.
    """
    return await beating(
        _optimize(site, request, token),
        f"optimize {request.update}",
        site.fleet.trainer(request.run).progress,
        stalled=TrainerLost,
    )


async def _optimize(site: Site, request: OptimizeRequest, token: FenceToken) -> UpdateReport:
    run = request.run
    store = store_of(run)
    spec = await asyncio.to_thread(spec_of, run)
    trainer, producer = site.fleet.trainer(run), site.fleet.producer(run)

    def train() -> Awaitable[UpdateReport]:
        return trainer.optimize(token, request.update, request.collection)

    await give_memory_to_trainer(site, run, token, spec, request.update)
    async with (
        site.reports.flowing(run, producer, site.tracker),
        timed(store, "training", request.update),
    ):
        report = await beside_healing(site, run, token, spec, train)
    await asyncio.to_thread(_write_rows, store, request, report)
    site.tracker.log(run, rollout_metrics(request.collection))
    site.tracker.log(run, train_metrics(report, request.collection))
    return report.model_copy(update={"engines_released": spec.colocated})


def _write_rows(store: Store, request: OptimizeRequest, report: UpdateReport) -> None:
    append_metrics(store, "rollout", request.update, rollout_metrics(request.collection))
    append_metrics(store, "train", request.update, train_metrics(report, request.collection))
    row = {
        "update": report.update,
        "epoch": request.epoch,
        "batch_sha256": report.batch_sha256,
        "policy_version": report.policy_version,
    }
    store.append_jsonl(layout.UPDATES, row)
