"""Placement groups of a run: one for the trainer, one bundle for each engine. Detached, named.

    cpu            trainer {CPU}            engines {CPU}, {CPU} ...
    disaggregated  trainer {CPU, GPU: N}    engines {CPU, GPU: tp}, {CPU, GPU: tp} ...
    colocated      trainer {CPU, GPU: N}, in which the engines live as well

The CPU shares are small: they keep processes of one role together without limiting how many runs
share a small machine. A colocated engine takes no GPU of Ray's: the trainer holds them, and the
engine is told which devices those are. It lies in the trainer's bundle, and so on its node.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import structlog

from configs.run import RunSpec
from models.errors import ConfigurationError, ServiceUnreachable
from workers.fleet.cluster import RayCluster

CPU_SHARE = 0.05
"""CPU of one bundle, in cores as Ray counts them."""
WARN_EVERY_S = 10.0
_FEWER = "lower inference.num_engines or add nodes"
_REMEDIES = {
    "GPU": "lower trainer.num_processes, inference.num_engines or inference.tensor_parallel_size, "
    'add nodes, or set placement.mode = "cpu"'
}

_log = structlog.get_logger(__name__)


Bundle = Mapping[str, float]
"""Resources that one or more actors of a role may take on one node, by Ray's names."""


def trainer_bundle(spec: RunSpec) -> Bundle:
    """What the trainer takes; colocated engines lie in it."""
    demand = spec.gpu_demand
    if demand is None:
        return _cpu(1)
    inside = spec.inference.num_engines if demand.colocated else 0
    return {**_cpu(1 + inside), "GPU": float(demand.trainer)}


def engine_bundles(spec: RunSpec) -> tuple[Bundle, ...]:
    """What each engine takes, in rank order; none when they lie in the trainer's bundle."""
    demand, engines = spec.gpu_demand, spec.inference.num_engines
    if demand is None:
        return (_cpu(1),) * engines
    gpus = {"GPU": float(demand.tensor_parallel)}
    return () if demand.colocated else ({**_cpu(1), **gpus},) * engines


async def place(
    cluster: RayCluster,
    run_id: str,
    role: str,
    bundles: Sequence[Bundle],
    timeout_s: float,
    *,
    beside: Sequence[Bundle] = (),
) -> Any:
    """The group of ``role``, found by name or made, with its resources held.

    ``beside``: what the run's other groups hold at the same time.

    Raises:
        ConfigurationError: the cluster, or every single node of it, is too small for that.
        ServiceUnreachable: the resources are taken by others and did not become free in time.
    """
    name = group_name(run_id, role)

    def make() -> Any:
        import ray

        try:
            group = ray.util.get_placement_group(name)
        except ValueError:
            group = None
        if group is not None and not _holds(group.bundle_specs, bundles):
            ray.util.remove_placement_group(group)
            group = None
        if group is None:
            group = ray.util.placement_group(
                [dict(bundle) for bundle in bundles],
                strategy="PACK",
                name=name,
                lifetime="detached",
            )
        return group

    group = await cluster.control(make, f"make placement group {name}")
    await _until_placed(cluster, group, _Wanted(name, bundles, beside), timeout_s)
    return group


def in_bundle(group: Any, index: int, num_gpus: float = 0) -> dict[str, Any]:
    """Ray options of an actor that takes ``num_gpus`` of bundle ``index`` of ``group``."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
    return {"scheduling_strategy": strategy, "num_cpus": CPU_SHARE, "num_gpus": num_gpus}


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


def _cpu(processes: int) -> dict[str, float]:
    # Ray counts in ten-thousandths of a core.
    return {"CPU": round(CPU_SHARE * processes, 4)}


def _holds(found: Sequence[Bundle], wanted: Sequence[Bundle]) -> bool:
    """Whether a group's bundles are those that are asked for."""
    return [dict(bundle) for bundle in found] == [dict(bundle) for bundle in wanted]


class _Wanted(NamedTuple):
    """A group and what it needs, see ``place``."""

    name: str
    bundles: Sequence[Bundle]
    beside: Sequence[Bundle]


async def _until_placed(cluster: RayCluster, group: Any, wanted: _Wanted, timeout_s: float) -> None:
    started, name = time.monotonic(), wanted.name
    while True:
        left = started + timeout_s - time.monotonic()
        step = max(0.0, min(left, WARN_EVERY_S))
        if await cluster.control(partial(group.wait, step), f"place {name}", step + 30.0):
            return
        missing = await _missing(cluster, wanted)
        if left <= step:
            raise ServiceUnreachable(
                f"no place for {name} within {timeout_s:g} s: {missing}; end other runs or add "
                "nodes"
            )
        _log.warning("waiting for resources", group=name, missing=missing)
        await asyncio.sleep(0)


async def _missing(cluster: RayCluster, wanted: _Wanted) -> str:
    """What the group needs beside what is free; raises when it can never be had."""

    def look() -> tuple[list[dict[str, float]], dict[str, float]]:
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return nodes, ray.available_resources()

    nodes, free = await cluster.control(look, "count resources")
    return shortage(wanted.name, wanted.bundles, nodes, free, wanted.beside)


def shortage(
    name: str,
    bundles: Sequence[Bundle],
    nodes: Sequence[Bundle],
    free: Bundle,
    beside: Sequence[Bundle] = (),
) -> str:
    """What ``bundles`` need of what is ``free``, all numbers as Ray counts them.

    Raises:
        ConfigurationError: ``nodes``, were they empty, could not hold them, or not ``beside`` too.
    """
    parts = []
    for resource in dict.fromkeys(resource for bundle in bundles for resource in bundle):
        shares = [bundle.get(resource, 0.0) for bundle in bundles]
        needed, largest = sum(shares), max(shares)
        others = sum(bundle.get(resource, 0.0) for bundle in beside)
        sizes = [node.get(resource, 0.0) for node in nodes]
        if needed <= sum(sizes) < needed + others:
            raise ConfigurationError(
                f"{name}: {needed:g} {resource} are needed beside {others:g} for the rest of the "
                f"run, the whole Ray cluster has {sum(sizes):g}: {_REMEDIES.get(resource, _FEWER)}"
            )
        if needed > sum(sizes):
            raise ConfigurationError(
                f"{name}: {len(bundles)} x {largest:g} = {needed:g} {resource} are needed, the "
                f"whole Ray cluster has {sum(sizes):g}: {_REMEDIES.get(resource, _FEWER)}"
            )
        if largest > max(sizes, default=0.0):
            raise ConfigurationError(
                f"{name}: {largest:g} {resource} are needed on one node, the largest node of the "
                f"Ray cluster has {max(sizes):g}: {_REMEDIES.get(resource, _FEWER)}"
            )
        parts.append(f"needs {needed:g} {resource}, free are {free.get(resource, 0.0):g}")
    return "; ".join(parts)
