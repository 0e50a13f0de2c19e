"""The load phase without files: the trainer packs bucket after bucket, all engines take each one.

::

    trainer   pack 0          pack 1          ...   drop
    engines          take 0          take 1   ...   (verify)

To take is to open the trainer's memory (ipc) or to receive a broadcast (nccl). Engines hold a
mixture of two versions from the first bucket to the last; they are paused for that long, and one
that fails on the way is replaced. The last bucket brings the version.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

from activities.loading import EngineUpdate, LoadOrder, Phase
from activities.publication_trace import PublicationTrace
from activities.site import Site, store_of
from activities.storage.lease import require_epoch
from models.errors import ServiceUnreachable
from models.publication import WeightBucket, WeightChannel


async def send_buckets(
    site: Site,
    order: LoadOrder,
    updates: Sequence[EngineUpdate],
    trace: PublicationTrace,
    packed: WeightBucket | None = None,
) -> None:
    """Bring the weights of ``order`` to every engine that does not serve them yet.

    Ends early when an engine fails: all of them are gone through again. The last bucket is left to
    the caller, who drops it while engines are verified; when this raises it is given up.

    Args:
        site: where everything is.
        order: weights that were offered.
        updates: all engines.
        trace: told of every step.
        packed: the first bucket, where the trainer holds it and it was asked for.

    Raises:
        StaleFence: another epoch owns the run's root.
        TrainerLost: the trainer died on the way.
    """
    trainer, version = site.fleet.trainer(order.run), order.weights.version
    due = [update for update in updates if update.is_due]
    if not due:
        return
    # Engines take no fence token, so a caller that lost its epoch must stop itself.
    await asyncio.to_thread(require_epoch, store_of(order.run), order.token.epoch)
    by_handle = order.weights.transport == "ipc"
    sending = _Opening(due, trace) if by_handle else _Broadcast(site, order, due, trace)
    await sending.begin()
    try:
        for index in range(order.weights.num_buckets):
            if not all(update.is_due for update in due):
                return
            bucket, packed = packed, None
            if bucket is None:
                with trace.step("bucket_pack", bucket=index):
                    bucket = await trainer.pack_bucket(order.token, version, index)
            await sending.send(bucket)
    except BaseException:
        await trainer.drop_bucket(order.token)
        raise


class _Opening:
    """Engines open the trainer's memory."""

    def __init__(self, due: Sequence[EngineUpdate], trace: PublicationTrace) -> None:
        self._due, self._trace = due, trace

    async def begin(self) -> None:
        """Nothing to prepare."""

    async def send(self, bucket: WeightBucket) -> None:
        """One bucket on all engines at once."""
        await all_ended(
            _told(self._trace, update, bucket, update.attempt_open(bucket)) for update in self._due
        )


class _Broadcast:
    """Engines receive what the trainer broadcasts in a group with them."""

    def __init__(
        self, site: Site, order: LoadOrder, due: Sequence[EngineUpdate], trace: PublicationTrace
    ) -> None:
        self._order, self._due, self._trace = order, due, trace
        self._trainer = site.fleet.trainer(order.run)
        self._channel: WeightChannel | None = None

    async def begin(self) -> None:
        """Use the group of these very engines, or make one."""
        engines = tuple(update.engine for update in self._due)
        token, timeout_s = self._order.token, self._order.timeout_s
        channel = await self._trainer.open_channel(token, engines, timeout_s)
        self._channel = channel
        if channel.connected:
            return
        joins: list[Awaitable[None]] = []
        rank = 1
        for update in self._due:
            joins.append(update.attempt_join(channel, rank))
            rank += max(1, len(update.engine.gpus))
        with self._trace.step("connect", group=channel.name, world=channel.world):
            meeting = self._trainer.connect_channel(token, channel.name)
            await all_ended([self._excused(meeting), *joins])

    async def send(self, bucket: WeightBucket) -> None:
        """One bucket to all engines at once."""
        channel = self._channel
        assert channel is not None  # begin has set it
        sending = self._trainer.broadcast_bucket(
            self._order.token, bucket.version, bucket.index, channel.name
        )
        takes = [
            _told(self._trace, update, bucket, update.attempt_receive(bucket, channel))
            for update in self._due
        ]
        with self._trace.step("broadcast", bucket=bucket.index, bytes=bucket.num_bytes):
            await all_ended([self._excused(sending), *takes])

    async def _excused(self, call: Awaitable[None]) -> None:
        """The trainer's side of it. That an engine does not come is that engine's failure.

        Which one is unknown, and the others wait in vain: all of them count as failed.
        """
        try:
            await call
        except ServiceUnreachable as error:
            for update in self._due:
                update.give_up(error)


async def _told(
    trace: PublicationTrace, update: EngineUpdate, bucket: WeightBucket, call: Awaitable[None]
) -> None:
    """``call`` between two lines of the diagnostics."""
    engine = update.engine
    name = f"engine_{Phase.LOAD.value}"
    with trace.step(name, engine=engine.name, url=engine.url, bucket=bucket.index):
        await call


async def all_ended(calls: Iterable[Awaitable[None]]) -> None:
    """All of them at once; returns, or raises, when the last one has ended."""
    ends = await asyncio.gather(*calls, return_exceptions=True)
    for end in ends:
        if end is not None:
            raise end
