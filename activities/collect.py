"""``collect``: one committed rollout collection, with engines replaced as they die."""

import asyncio

from activities.healing import with_healing
from activities.heartbeat import beating
from activities.rows import refuse_non_finite
from activities.site import Site, spec_of, store_of
from activities.timing import timed
from models.errors import ProducerLost
from models.ids import FenceToken
from models.rollout import CollectRequest, RolloutCollection


async def collect(site: Site, request: CollectRequest, token: FenceToken) -> RolloutCollection:
    """The collection of ``request.update``; asked again, the producer answers with the same one."""
    return await beating(
        _collect(site, request, token),
        f"collect {request.update}",
        site.fleet.producer(request.run).progress,
        stalled=ProducerLost,
    )


async def _collect(site: Site, request: CollectRequest, token: FenceToken) -> RolloutCollection:
    run = request.run
    spec = await asyncio.to_thread(spec_of, run)
    producer = site.fleet.producer(run)
    async with (
        site.reports.flowing(run, producer, site.tracker),
        timed(store_of(run), "generation_wait", request.update),
    ):
        collection = await with_healing(
            site, run, token, spec, lambda: producer.collect(token, request)
        )
        refuse_non_finite(
            f"collection {collection.update}",
            {"reward_mean": collection.reward_mean, **collection.metrics},
        )
        return collection
