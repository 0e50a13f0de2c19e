"""``evaluate``: the held-out prompts under the live policy."""

import asyncio

from activities.healing import with_healing
from activities.heartbeat import beating
from activities.rows import append_metrics, eval_metrics, eval_samples
from activities.site import Site, spec_of, store_of
from activities.timing import timed
from models.errors import ProducerLost
from models.evaluation import EvaluateRequest, EvaluationReport
from models.ids import FenceToken


async def evaluate(site: Site, request: EvaluateRequest, token: FenceToken) -> EvaluationReport:
    """Sample and score the held-out set; engines that die meanwhile are replaced."""
    return await beating(
        _evaluate(site, request, token),
        f"evaluate {request.update}",
        site.fleet.producer(request.run).progress,
        stalled=ProducerLost,
    )


async def _evaluate(site: Site, request: EvaluateRequest, token: FenceToken) -> EvaluationReport:
    run = request.run
    spec = await asyncio.to_thread(spec_of, run)
    producer = site.fleet.producer(run)
    store = store_of(run)
    rollout_id = request.update - 1 if request.update > 0 else None
    async with (
        site.reports.flowing(run, producer, site.tracker),
        timed(store, "evaluation", rollout_id, {"phase": request.phase}),
    ):
        report = await with_healing(
            site, run, token, spec, lambda: producer.evaluate(token, request)
        )
        metrics = eval_metrics(report)
        names = eval_samples(report)
        await asyncio.to_thread(append_metrics, store, "eval", request.update, metrics, names)
    site.tracker.log(run, metrics)
    return report
