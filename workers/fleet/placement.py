"""Placement groups of a run: one for the trainer, one bundle for each engine. Detached, named.

On a cluster without GPUs the bundles are small CPU fractions: they keep processes of one role
together without limiting how many runs share a small machine.
"""

import asyncio
import time
from functools import partial
from typing import Any

import structlog

from models.errors import ConfigurationError, ServiceUnreachable
from workers.fleet.cluster import RayCluster

CPU_SHARE = 0.05
"""CPU of one bundle, in cores as Ray counts them."""
WARN_EVERY_S = 10.0

_log = structlog.get_logger(__name__)


async def place(
    cluster: RayCluster, run_id: str, role: str, num_bundles: int, timeout_s: float
) -> Any:
    """The group of ``role``, found by name or made, with its resources held.

    Raises:
        ConfigurationError: the cluster never has that much of some resource.
        ServiceUnreachable: the resources are taken by others and did not become free in time.
    """
    name = group_name(run_id, role)

    def make() -> Any:
        import ray

        try:
            group = ray.util.get_placement_group(name)
        except ValueError:
            group = None
        if group is not None and group.bundle_count != num_bundles:
            ray.util.remove_placement_group(group)
            group = None
        if group is None:
            group = ray.util.placement_group(
                [dict(bundle()) for _ in range(num_bundles)],
                strategy="PACK",
                name=name,
                lifetime="detached",
            )
        return group

    group = await cluster.control(make, f"make placement group {name}")
    await _until_placed(cluster, group, name, num_bundles, timeout_s)
    return group


def in_bundle(group: Any, index: int) -> dict[str, Any]:
    """Ray options of an actor that takes bundle ``index`` of ``group``."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
    return {"scheduling_strategy": strategy, "num_cpus": CPU_SHARE}


async def unplace(cluster: RayCluster, run_id: str, role: str) -> None:
    """Remove the group of ``role`` with whatever still runs in it; nothing when there is none."""
    name = group_name(run_id, role)

    def remove() -> None:
        import ray

        try:
            group = ray.util.get_placement_group(name)
        except ValueError:
            return
        ray.util.remove_placement_group(group)

    await cluster.control(remove, f"remove placement group {name}")


def group_name(run_id: str, role: str) -> str:
    """Name of a group; unlike actors, groups of all runs share one namespace."""
    return f"{run_id}:{role}"


def bundle() -> dict[str, float]:
    """Resources of one process of a run."""
    return {"CPU": CPU_SHARE}


async def _until_placed(
    cluster: RayCluster, group: Any, name: str, num_bundles: int, timeout_s: float
) -> None:
    started = time.monotonic()
    while True:
        left = started + timeout_s - time.monotonic()
        step = max(0.0, min(left, WARN_EVERY_S))
        if await cluster.control(partial(group.wait, step), f"place {name}", step + 30.0):
            return
        missing = await _missing(cluster, num_bundles)
        if left <= step:
            raise ServiceUnreachable(
                f"no place for {name} within {timeout_s:g} s: {missing}; end other runs or add "
                "nodes"
            )
        _log.warning("waiting for resources", group=name, missing=missing)
        await asyncio.sleep(0)


async def _missing(cluster: RayCluster, num_bundles: int) -> str:
    """What the group needs beside what is free; raises when it can never be had."""

    def look() -> tuple[dict[str, float], dict[str, float]]:
        import ray

        return ray.cluster_resources(), ray.available_resources()

    total, free = await cluster.control(look, "count resources")
    parts = []
    for resource, share in bundle().items():
        needed = share * num_bundles
        if needed > total.get(resource, 0.0):
            raise ConfigurationError(
                f"{num_bundles} processes need {needed:g} {resource}, the whole Ray cluster has "
                f"{total.get(resource, 0.0):g}: lower inference.num_engines or add nodes"
            )
        parts.append(f"needs {needed:g} {resource}, free are {free.get(resource, 0.0):g}")
    return "; ".join(parts)
