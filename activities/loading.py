"""Bringing one engine to one policy version, confirmed by version and digest of live tensors.

::

    wake -> inspect -> pause -> load -> verify -> resume
               |                                    ^
               +---- serves these very weights -----+

An engine that gave its memory back takes it again first (wake, see ``waking``); others have nothing
to do there.
An engine that fails on the way stays paused and is never opened again: it must not generate with
weights that nobody confirmed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum

from activities.multiplier import infra_timeout_multiplier
from activities.site import Site, store_of
from activities.storage.lease import require_epoch
from activities.waking import Waking
from activities.wire.contract import InitWeightsUpdateGroup
from activities.wire.digest import weights_digest
from configs.run import RunSpec
from models.errors import ContractViolation, DigestMismatch, ServiceUnreachable
from models.ids import FenceToken, RunRef
from models.ports import EngineHandle
from models.publication import (
    CPU,
    EngineConfirmation,
    EngineFailure,
    WeightBucket,
    WeightChannel,
    WeightsRef,
)


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Which weights the engines of ``run`` shall serve, and on whose behalf."""

    run: RunRef
    token: FenceToken
    weights: WeightsRef
    timeout_s: float
    """Seconds for the phases up to ``verify`` together, and once more for ``resume``; a wake that
    began before has as many of its own."""


class Phase(StrEnum):
    """The phases of an update, in their order."""

    WAKE = "wake"
    INSPECT = "inspect"
    PAUSE = "pause"
    LOAD = "load"
    VERIFY = "verify"
    RESUME = "resume"


class EngineUpdate:
    """One engine on its way to the weights of an order. Used once; close it afterwards."""

    def __init__(
        self, site: Site, order: LoadOrder, engine: EngineHandle, waking: Waking | None = None
    ) -> None:
        """``waking``: the engine's, where somebody has begun it."""
        self.engine = engine
        self.repeated = False
        """The engine served exactly these weights already; then it is only resumed."""
        self.failure: EngineFailure | None = None
        self.error: ContractViolation | ServiceUnreachable | None = None
        self._order = order
        self._waking = waking or Waking(site, engine)
        self._client = self._waking.client
        self._deadline = asyncio.get_running_loop().time() + order.timeout_s
        self._steps: dict[Phase, Callable[[], Awaitable[None]]] = {
            Phase.WAKE: self._waking.ended,
            Phase.INSPECT: self._inspect,
            Phase.PAUSE: self._pause,
            Phase.LOAD: self._load,
            Phase.VERIFY: self._verify,
            Phase.RESUME: self._client.resume,
        }

    @property
    def confirmation(self) -> EngineConfirmation:
        """What the engine was confirmed to serve."""
        weights = self._order.weights
        return EngineConfirmation(
            engine=self.engine.name,
            version=weights.version,
            digest=weights.digest,
            seconds=time.monotonic() - self._waking.started,
        )

    async def take(self, phase: Phase) -> None:
        """Do one phase; what would move nothing is skipped.

        Raises:
            ServiceUnreachable: no answer within the order's deadline.
            ContractViolation: the engine refused, or its version or digest differs.
            StaleFence: (load) another epoch owns the run's root.
        """
        if self.repeated and phase is not Phase.RESUME:
            return
        deadline = self._deadline
        if phase is Phase.RESUME:  # comes after waits for other engines
            deadline = asyncio.get_running_loop().time() + self._order.timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._steps[phase]()
        except TimeoutError as error:
            raise ServiceUnreachable(
                f"{self._who}: no end of {phase} within {self._order.timeout_s:g} s of the update"
            ) from error

    async def attempt(self, phase: Phase) -> None:
        """``take``, with an engine's failure kept in ``error`` and ``failure``, not raised."""
        await self._tried(phase, self.take(phase))

    async def attempt_open(self, bucket: WeightBucket) -> None:
        """A part of the load phase: open one bucket in the trainer's memory.

        Buckets come in their order, the last one with the version. Failures are kept as by
        ``attempt``.
        """
        await self._tried(Phase.LOAD, self._open(bucket))

    async def attempt_join(self, channel: WeightChannel, rank: int) -> None:
        """Before the load phase: join a group, the engine's first process as ``rank``."""
        await self._tried(Phase.LOAD, self._join(channel, rank))

    async def attempt_receive(self, bucket: WeightBucket, channel: WeightChannel) -> None:
        """``attempt_open`` for a bucket that is being broadcast."""
        await self._tried(Phase.LOAD, self._receive(bucket, channel))

    def give_up(self, error: ServiceUnreachable) -> None:
        """Count the engine as failed in the load phase, if it has not failed before."""
        if self.failure is None:
            self._fail(Phase.LOAD, error)

    @property
    def is_due(self) -> bool:
        """Whether the engine still has weights to load."""
        return not self.repeated and self.failure is None

    async def _tried(self, phase: Phase, step: Awaitable[None]) -> None:
        try:
            await step
        except (ContractViolation, ServiceUnreachable) as error:
            self._fail(phase, error)

    def _fail(self, phase: Phase, error: ContractViolation | ServiceUnreachable) -> None:
        self.error = error
        self.failure = EngineFailure(
            engine=self.engine.name,
            incarnation=self.engine.incarnation,
            phase=phase.value,
            error=error.message,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    @property
    def _who(self) -> str:
        return f"{self.engine.name} at {self.engine.url}"

    async def _inspect(self) -> None:
        weights = self._order.weights
        if _policy_version(self._waking.found) == weights.version:
            self.repeated = await self._digest() == weights.digest

    async def _pause(self) -> None:
        if not self._waking.is_paused:
            await self._client.pause("abort")

    async def _load(self) -> None:
        # Engines take no fence token, so a caller that lost its epoch must stop itself.
        order = self._order
        await asyncio.to_thread(require_epoch, store_of(order.run), order.token.epoch)
        await self._client.update_weights_from_disk(
            order.weights.path, order.weights.version, order.timeout_s
        )

    async def _open(self, bucket: WeightBucket) -> None:
        version = self._version_of(bucket)
        await self._client.update_weights_from_tensor(
            bucket.handles,
            self.engine.gpus or (CPU,),
            version,
            self._seconds_left,
            flush_cache=version is not None,
        )

    async def _join(self, channel: WeightChannel, rank: int) -> None:
        group = InitWeightsUpdateGroup(
            master_address=channel.address,
            master_port=channel.port,
            rank_offset=rank,
            world_size=channel.world,
            group_name=channel.name,
            backend=channel.backend,
        )
        await self._client.init_weights_update_group(group, timeout_s=self._seconds_left)

    async def _receive(self, bucket: WeightBucket, channel: WeightChannel) -> None:
        version = self._version_of(bucket)
        self._client.adopt_weights_update_group(channel.name)
        await self._client.update_weights_from_distributed(
            channel.name,
            bucket.tensors,
            version,
            self._seconds_left,
            flush_cache=version is not None,
        )

    def _version_of(self, bucket: WeightBucket) -> int | None:
        """What the engine serves once it has the bucket; None while more of them follow."""
        weights = self._order.weights
        return weights.version if bucket.index == weights.num_buckets - 1 else None

    @property
    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def _verify(self) -> None:
        weights = self._order.weights
        told, digest = await asyncio.gather(self._weight_version(), self._digest())
        version = _policy_version(told)
        if version != weights.version:
            raise ContractViolation(
                f"{self._who} serves version {version} after loading version {weights.version}"
            )
        if digest != weights.digest:
            raise DigestMismatch(
                f"{self._who}: weights of version {version} have digest {digest}, the trainer "
                f"exported {weights.digest}"
            )

    async def _weight_version(self) -> str:
        return str((await self._client.model_info()).get("weight_version", ""))

    async def _digest(self) -> str:
        return weights_digest(await self._client.checksums(self._order.weights.checksum))


def _policy_version(weight_version: str) -> int | None:
    """The policy version that an engine says it serves; None for a foreign string."""
    return int(weight_version) if weight_version.isdecimal() else None


def update_timeout_s(spec: RunSpec) -> float:
    """Deadline of an engine's update on this cluster, in seconds."""
    return spec.inference.update_timeout_s * infra_timeout_multiplier()


async def load_engine(site: Site, order: LoadOrder, engine: EngineHandle) -> EngineConfirmation:
    """Make ``engine`` serve the weights of ``order``, all phases in a row. Raises as ``take``."""
    async with aclosing(EngineUpdate(site, order, engine)) as update:
        for phase in Phase:
            await update.take(phase)
        return update.confirmation


async def load_engines(
    site: Site, order: LoadOrder, engines: Sequence[EngineHandle]
) -> dict[str, ContractViolation | ServiceUnreachable]:
    """``load_engine`` on all at once; waits for all of them. What those that failed failed with.

    Raises:
        StaleFence: another epoch owns the run's root.
    """
    ends = await asyncio.gather(
        *(load_engine(site, order, engine) for engine in engines), return_exceptions=True
    )
    failures: dict[str, ContractViolation | ServiceUnreachable] = {}
    for engine, end in zip(engines, ends, strict=True):
        if isinstance(end, ContractViolation | ServiceUnreachable):
            failures[engine.name] = end
        elif isinstance(end, BaseException):
            raise end
    return failures
