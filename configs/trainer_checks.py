"""Checks on the trainer: its processes and what a step holds, the attention kernel of GPUs."""

from collections.abc import Iterator

from configs.problem import Problem
from configs.run import RunSpec


def process_problems(spec: RunSpec) -> Iterator[Problem]:
    """Every rank of the trainer takes as many samples of each optimizer step as any other.

    For a run whose steps divide its collections.
    """
    processes, samples = spec.trainer.num_processes, spec.samples_per_step
    if samples % processes:
        fitting = max(n for n in range(1, processes) if samples % n == 0)
        yield Problem(
            "trainer.num_processes",
            f"must divide the {samples} samples of an optimizer step "
            "(training.global_batch_size, or the whole collection), so that every process takes "
            "as many",
            processes,
            f"use {fitting}, or make training.global_batch_size a multiple of {processes}",
        )


def kernel_problems(spec: RunSpec) -> Iterator[Problem]:
    """What the attention kernel for documents needs, where a key cannot do without it.

    The size of the heads is for the trainer to refuse, when it loads the model.
    """
    trainer = spec.trainer
    if trainer.compile and (spec.has_routers or spec.training.use_rollout_routing_replay):
        yield Problem(
            "trainer.compile",
            "is for dense models: the routers of a mixture of experts are counted and replayed "
            "between operations",
            True,
            "remove it",
        )
    for key, value in _asking_for_kernel(spec):
        needs = "needs the attention kernel for documents, which "
        if spec.gpu_demand is None:
            why = f"is there on GPUs only (placement.mode {spec.placement.mode!r} gives none)"
            yield Problem(key, needs + why, value, "remove the key, or place the run on GPUs")
        if trainer.compute_dtype != "bfloat16":
            why = f"computes in bfloat16 (trainer.compute_dtype is {trainer.compute_dtype!r})"
            yield Problem(key, needs + why, value, 'set trainer.compute_dtype = "bfloat16"')
        if trainer.packing == "shared_prompt":
            why = "knows no rows that share a prompt (trainer.packing is 'shared_prompt')"
            yield Problem(key, needs + why, value, 'remove trainer.packing, or set "documents"')
    if trainer.compile and trainer.attention == "eager":
        yield Problem(
            "trainer.compile",
            "needs the attention kernel for documents, which attention 'eager' does not take",
            True,
            'set trainer.attention = "flash", or remove trainer.compile',
        )


def _asking_for_kernel(spec: RunSpec) -> Iterator[tuple[str, object]]:
    """Keys that cannot do without it, with their values."""
    if spec.trainer.attention in ("flash", "flash4"):
        yield "trainer.attention", spec.trainer.attention
    if spec.trainer.compile:
        yield "trainer.compile", True
