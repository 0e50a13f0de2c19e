"""Bringing one engine to one policy version, confirmed by version and digest of live tensors."""

import contextlib
import time
from dataclasses import dataclass

from activities.site import EngineControl, Site
from activities.wire.digest import weights_digest
from models.errors import ContractViolation, DigestMismatch
from models.ports import EngineHandle
from models.publication import EngineConfirmation, WeightsRef


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What it took to bring an engine to a version."""

    confirmation: EngineConfirmation
    repeated: bool
    """The engine served exactly these weights already."""
    pause_seconds: float
    load_seconds: float


async def load_engine(
    site: Site, engine: EngineHandle, weights: WeightsRef, timeout_s: float
) -> EngineLoad:
    """Make ``engine`` serve ``weights``; nothing moves when it does so already.

    An engine that fails here stays paused: it must not generate with weights that nobody confirmed.

    Raises:
        ServiceUnreachable: it did not answer in time.
        ContractViolation: it refused, or its version or digest differs afterwards.
    """
    client = site.engine(engine.url)
    async with contextlib.aclosing(client):
        started = time.monotonic()
        if await _serves(client, weights):
            # An earlier attempt may have died between loading and resuming.
            await client.resume()
            return EngineLoad(_confirmed(engine, weights, started), True, 0.0, 0.0)
        await client.pause("abort")
        paused = time.monotonic()
        await client.update_weights_from_disk(weights.path, weights.version, timeout_s)
        await _verify(client, engine, weights)
        loaded = time.monotonic()
        await client.resume()
        return EngineLoad(
            _confirmed(engine, weights, started), False, paused - started, loaded - paused
        )


async def _serves(client: EngineControl, weights: WeightsRef) -> bool:
    if await _served_version(client) != weights.version:
        return False
    return await _digest(client) == weights.digest


async def _verify(client: EngineControl, engine: EngineHandle, weights: WeightsRef) -> None:
    version = await _served_version(client)
    if version != weights.version:
        raise ContractViolation(
            f"{engine.name} at {engine.url} serves version {version} after loading version "
            f"{weights.version}"
        )
    digest = await _digest(client)
    if digest != weights.digest:
        raise DigestMismatch(
            f"{engine.name} at {engine.url}: weights of version {version} have digest {digest}, "
            f"the trainer exported {weights.digest}"
        )


async def _served_version(client: EngineControl) -> int | None:
    """The policy version that the engine says it serves; None for a foreign version string."""
    version = str((await client.model_info()).get("weight_version", ""))
    return int(version) if version.isdecimal() else None


async def _digest(client: EngineControl) -> str:
    return weights_digest(await client.checksums())


def _confirmed(engine: EngineHandle, weights: WeightsRef, started: float) -> EngineConfirmation:
    return EngineConfirmation(
        engine=engine.name,
        version=weights.version,
        digest=weights.digest,
        seconds=time.monotonic() - started,
    )
