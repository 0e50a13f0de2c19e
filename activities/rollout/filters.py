"""Which finished groups train: groups whose rewards all tie carry no gradient."""

import math
from collections.abc import Sequence

ZERO_STD = 1e-8
"""A sample standard deviation at or below this is a tie."""

VERIFIER_ERROR = "verifier_error"
"""Drop reason of a group with a sample that no verifier could score."""


def sample_std(values: Sequence[float]) -> float:
    """Standard deviation with ddof 1; 0.0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def has_mixed_rewards(rewards: Sequence[float]) -> bool:
    """Whether siblings differ, that is, whether the group has a policy gradient."""
    return sample_std(rewards) > ZERO_STD


def tied_reward(rewards: Sequence[float]) -> str | None:
    """The first reward, rounded to one decimal, of a scored group whose rewards all tie."""
    if not all(map(math.isfinite, rewards)) or has_mixed_rewards(rewards):
        return None
    return f"{round(rewards[0], 1) + 0.0:.1f}"  # never -0.0


def drop_reason(rewards: Sequence[float], filter_zero_std: bool) -> str | None:
    """Why a finished group must not train, or None to keep it.

    ``verifier_error`` when a reward is not finite; ``zero_std_R`` with the first reward rounded to
    one decimal when all tie and ``filter_zero_std`` is on.
    """
    if not all(map(math.isfinite, rewards)):
        return VERIFIER_ERROR
    tied = tied_reward(rewards) if filter_zero_std else None
    return None if tied is None else f"zero_std_{tied}"
