"""Group-relative advantages (GRPO): how much better a response is than its siblings."""

import math
from collections.abc import Sequence

from activities.rollout.filters import has_mixed_rewards, sample_std

STD_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], std_normalization: bool) -> list[float]:
    """Rewards minus their mean, one a sibling; exactly 0 for all when the rewards tie.

    With ``std_normalization`` each is divided by (s + 1e-6), where s is the sample standard
    deviation (ddof 1): [1, 0, 0, 0] -> 0.75, -0.25 ... -> 1.5, -0.5 ...

    Raises:
        ValueError: a reward is not finite; such a group has no advantages.
    """
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards {list(rewards)} are not all finite")
    if not has_mixed_rewards(rewards):
        # The mean of three times 0.1 is not 0.1: rounding must not look like a gradient.
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    scale = sample_std(rewards) + STD_EPSILON if std_normalization else 1.0
    return [(reward - mean) / scale for reward in rewards]
