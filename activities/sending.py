"""The load phase without files: the trainer packs bucket after bucket, all engines open each one.

::

    trainer   pack 0         pack 1         ...   drop
    engines          open 0         open 1  ...        (verify)

Engines hold a mixture of two versions from the first bucket to the last; they are paused for that
long, and one that fails on the way is replaced. The last bucket brings the version.
"""

import asyncio
from collections.abc import Sequence

from activities.loading import EngineUpdate, LoadOrder, Phase
from activities.publication_trace import PublicationTrace
from activities.site import Site, store_of
from activities.storage.lease import require_epoch
from models.publication import WeightBucket


async def send_buckets(
    site: Site, order: LoadOrder, updates: Sequence[EngineUpdate], trace: PublicationTrace
) -> None:
    """Bring the weights of ``order`` to every engine that does not serve them yet.

    Ends early when an engine fails: all of them are gone through again.

    Raises:
        StaleFence: another epoch owns the run's root.
        TrainerLost: the trainer died on the way.
    """
    due = [update for update in updates if update.is_due]
    if not due:
        return
    # Engines take no fence token, so a caller that lost its epoch must stop itself.
    await asyncio.to_thread(require_epoch, store_of(order.run), order.token.epoch)
    trainer, version = site.fleet.trainer(order.run), order.weights.version
    try:
        for index in range(order.weights.num_buckets):
            with trace.step("bucket_pack", bucket=index):
                bucket = await trainer.pack_bucket(order.token, version, index)
            await _open(due, bucket, trace)
            if not all(update.is_due for update in due):
                return
    finally:
        await trainer.drop_bucket(order.token)


async def _open(
    updates: Sequence[EngineUpdate], bucket: WeightBucket, trace: PublicationTrace
) -> None:
    """One bucket on all engines at once; returns, or raises, when the last one has answered."""

    async def attempt(update: EngineUpdate) -> None:
        name, url = update.engine.name, update.engine.url
        with trace.step(f"engine_{Phase.LOAD.value}", engine=name, url=url, bucket=bucket.index):
            await update.attempt_bucket(bucket)

    ends = await asyncio.gather(*map(attempt, updates), return_exceptions=True)
    for end in ends:
        if end is not None:
            raise end
