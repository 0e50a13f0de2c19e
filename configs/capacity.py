"""How much a fully async producer has in flight: the bounds, worked out from the run file."""

import math

from configs.run import RunSpec


def automatic_concurrent_samples(
    *, engines: int, slots: int, samples_per_collection: int, samples_per_prompt: int
) -> int:
    """The default of ``async.async_max_concurrent_samples``.

    The larger of one collection and two waves of serving slots, rounded up to whole groups.

    Args:
        engines: engine processes.
        slots: requests that one engine serves at once, the smaller of open calls and running ones.
        samples_per_collection: samples of one collection.
        samples_per_prompt: samples of a group.
    """
    target = max(samples_per_collection, 2 * engines * slots)
    return math.ceil(target / samples_per_prompt) * samples_per_prompt


def concurrent_groups(spec: RunSpec) -> int:
    """Groups that the producer may own unfinished, at least one."""
    given = spec.asynchronous.async_max_concurrent_samples
    inference, n = spec.inference, spec.training.samples_per_prompt
    if given is None:
        given = automatic_concurrent_samples(
            engines=inference.num_engines,
            slots=min(inference.server_concurrency, inference.max_running_requests),
            samples_per_collection=spec.samples_per_collection,
            samples_per_prompt=n,
        )
    return max(1, given // n)


def completed_groups_capacity(spec: RunSpec) -> int:
    """Finished groups that may wait for the trainer."""
    factor = spec.asynchronous.async_data_buffer_capacity_factor
    return math.floor(factor * spec.training.rollout_batch_size)
