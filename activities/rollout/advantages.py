"""Group-relative advantages (GRPO): how much better a response is than its siblings."""

import math
from collections.abc import Sequence

from activities.rollout.filters import sample_std

STD_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], std_normalization: bool) -> list[float]:
    """Rewards minus their mean, one a sibling.

    With ``std_normalization``, more than one sample and a positive sample standard deviation s
    (ddof 1), each is divided by (s + 1e-6): [1, 0, 0, 0] -> 0.75, -0.25 ... -> 1.5, -0.5 ...

    Raises:
        ValueError: a reward is not finite; such a group has no advantages.
    """
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards {list(rewards)} are not all finite")
    mean = math.fsum(rewards) / len(rewards)
    centered = [reward - mean for reward in rewards]
    std = sample_std(rewards)
    if std_normalization and std > 0:
        return [value / (std + STD_EPSILON) for value in centered]
    return centered
