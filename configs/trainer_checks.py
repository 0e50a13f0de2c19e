"""Checks between the trainer's processes and what an optimizer step holds."""

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
