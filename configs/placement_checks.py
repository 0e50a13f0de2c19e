"""Checks of ``[placement]``: who may be placed where, and whether it fits, with the arithmetic."""

from collections.abc import Iterator

from configs.held_out import has_background_evaluation
from configs.placement import PlacementSection
from configs.placement_memory import memory_problems
from configs.problem import Problem
from configs.run import RunSpec
from configs.sglang_model_checks import cut_problems
from configs.topology import topology_problems


def placement_problems(spec: RunSpec) -> Iterator[Problem]:
    """Every contradiction between the placement, the engines and the trainer."""
    yield from _without_gpus(spec)
    yield from _engine(spec)
    yield from _turns(spec)
    demand = spec.gpu_demand
    if demand is None:
        return
    yield from _background(spec)
    if spec.colocated and demand.rollout != demand.trainer:
        yield from _unequal(spec)
        return
    found = list(topology_problems(demand))
    yield from found
    if not found:
        yield from cut_problems(spec)
        yield from memory_problems(spec)


def _without_gpus(spec: RunSpec) -> Iterator[Problem]:
    """Keys that say nothing where no GPU is taken."""
    if spec.gpu_demand is not None:
        return
    for name in ("gpus_per_node", "gpu_memory_gib"):
        value = getattr(spec.placement, name)
        if value != PlacementSection.model_fields[name].default:
            yield Problem(
                f"placement.{name}",
                "only a run that takes GPUs has that, and this one takes none (placement.mode "
                f'{spec.placement.mode!r}, inference.engine "{spec.inference.engine}")',
                value,
                "remove the key, or place the run on GPUs",
            )


def _engine(spec: RunSpec) -> Iterator[Problem]:
    if spec.inference.engine == "native" and spec.placement.mode == "disaggregated":
        yield Problem(
            "placement.mode",
            "gives engines GPUs of their own, and the native engine computes on the CPU only",
            spec.placement.mode,
            'use "cpu", or set inference.engine = "sglang"',
        )


def _turns(spec: RunSpec) -> Iterator[Problem]:
    """Colocated engines have no memory while the trainer steps, so nobody may sample then."""
    if not spec.colocated:
        return
    if spec.fully_async:
        yield Problem(
            "placement.mode",
            "takes turns: engines have no memory while the trainer steps, and a fully async run "
            "samples all the time",
            spec.placement.mode,
            'use "disaggregated", or set async.fully_async = false',
        )
    elif spec.overlaps:
        yield Problem(
            "core.max_policy_lag",
            'must keep sampling and training apart with placement.mode = "colocated": engines '
            "have no memory while the trainer steps, and from "
            f"{2 * spec.steps_per_update - 1} on the next collection is sampled meanwhile",
            spec.max_policy_lag,
            f"use {spec.steps_per_update - 1}, or another placement.mode",
        )


def _background(spec: RunSpec) -> Iterator[Problem]:
    if has_background_evaluation(spec):
        yield Problem(
            "evaluation.mode",
            "a background evaluation starts an engine of its own, for which a run on GPUs has "
            "none to spare",
            "background",
            'use "shared"',
        )


def _unequal(spec: RunSpec) -> Iterator[Problem]:
    """Every GPU of the trainer belongs to exactly one colocated engine."""
    inference, trainer = spec.inference, spec.trainer.num_processes
    parallel, engines = inference.tensor_parallel_size, inference.num_engines
    if trainer % parallel:
        yield Problem(
            "inference.tensor_parallel_size",
            f"must divide the {trainer} GPUs of the trainer (trainer.num_processes) that colocated "
            f"engines share: {trainer} % {parallel} = {trainer % parallel}",
            parallel,
            f"use one of {', '.join(str(n) for n in range(1, trainer + 1) if not trainer % n)}",
        )
        return
    yield Problem(
        "inference.num_engines",
        f"colocated engines share the GPUs of the trainer, each GPU one engine: {engines} engines "
        f"x inference.tensor_parallel_size {parallel} = {engines * parallel} GPUs, "
        f"trainer.num_processes = {trainer}",
        engines,
        f"use {trainer // parallel}, or set trainer.num_processes = {engines * parallel}",
    )
