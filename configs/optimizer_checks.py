"""Checks between the keys of ``[optimizer]``."""

from collections.abc import Iterator

from configs.problem import Problem
from configs.run import RunSpec
from configs.training import OptimizerSection


def rate_problems(optimizer: OptimizerSection) -> Iterator[Problem]:
    """Learning rates above the peak, and keys that the chosen schedule does not look at."""
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(optimizer, name) > optimizer.learning_rate:
            yield Problem(
                f"optimizer.{name}",
                f"must not exceed optimizer.learning_rate ({optimizer.learning_rate})",
                getattr(optimizer, name),
            )
    if optimizer.lr_warmup_init > 0 and optimizer.lr_warmup_steps == 0:
        yield Problem(
            "optimizer.lr_warmup_init",
            "says nothing without a warm-up",
            optimizer.lr_warmup_init,
            "set optimizer.lr_warmup_steps to 1 or more, or remove the key",
        )
    if optimizer.lr_schedule == "constant" and optimizer.lr_decay_steps is not None:
        yield Problem(
            "optimizer.lr_decay_steps",
            "a constant learning rate does not decay",
            optimizer.lr_decay_steps,
            "remove the key or choose another optimizer.lr_schedule",
        )
    if (optimizer.lr_schedule == "WSD") != (optimizer.lr_wsd_decay_steps is not None):
        yield Problem(
            "optimizer.lr_wsd_decay_steps",
            'goes with optimizer.lr_schedule = "WSD", and that needs it',
            optimizer.lr_wsd_decay_steps,
            "give both or neither",
        )


def decay_problems(spec: RunSpec) -> Iterator[Problem]:
    """Phases of the schedule that do not fit one after the other; the batch shape is sound."""
    optimizer, steps = spec.optimizer, spec.lr_decay_steps
    if optimizer.lr_schedule == "constant":
        return
    if optimizer.lr_warmup_steps >= steps:
        yield Problem(
            "optimizer.lr_warmup_steps",
            f"must be less than the {steps} optimizer steps of the decay (optimizer.lr_decay_steps,"
            " by default those of the run), or nothing is left to decay",
            optimizer.lr_warmup_steps,
            'shorten it, or set optimizer.lr_schedule = "constant"',
        )
        return
    room = steps - optimizer.lr_warmup_steps
    if optimizer.lr_wsd_decay_steps is not None and optimizer.lr_wsd_decay_steps > room:
        yield Problem(
            "optimizer.lr_wsd_decay_steps",
            f"must fit between the warm-up ({optimizer.lr_warmup_steps} optimizer steps) and the "
            f"end of the decay ({steps})",
            optimizer.lr_wsd_decay_steps,
            f"use at most {room}",
        )
