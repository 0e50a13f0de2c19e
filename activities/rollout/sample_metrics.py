"""What the samples of a collection say as a whole: lengths, versions, repetition, prefix cache."""

import zlib
from collections.abc import Sequence
from statistics import fmean, median

from models.sample import Sample

REPETITION_WINDOW = 10_000
"""Characters at the end of a text that are looked at; a shorter text is never called repetitive."""
REPETITION_FACTOR = 10.0
"""A window that zlib makes smaller than by this factor repeats itself."""


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """The ``rollout/`` metrics of N >= 1 samples, each counted once.

    ``weight_version/min``, ``mean`` and ``median`` are of each sample's oldest version, ``max`` of
    its newest. ``prefix_cache_hit_rate`` is left out when no engine told.
    """
    lengths = [len(sample.response_token_ids) for sample in samples]
    oldest = [sample.oldest_version for sample in samples]
    metrics: dict[str, float] = {
        "rollout/response_len/mean": fmean(lengths),
        "rollout/response_len/median": median(lengths),
        "rollout/response_len/min": min(lengths),
        "rollout/response_len/max": max(lengths),
        "rollout/repetition_frac": fmean(is_repetitive(sample.text) for sample in samples),
        "rollout/weight_version/mean": fmean(oldest),
        "rollout/weight_version/median": median(oldest),
        "rollout/weight_version/min": min(oldest),
        "rollout/weight_version/max": max(sample.replay_version for sample in samples),
        "rollout/weight_version/mixed_version_ratio": fmean(sample.is_mixed for sample in samples),
    }
    hit_rate = prefix_cache_hit_rate(samples)
    if hit_rate is not None:
        metrics["rollout/prefix_cache_hit_rate"] = hit_rate
    return metrics


def is_repetitive(text: str) -> bool:
    """Whether the end of ``text`` repeats itself, as far as zlib at its best can tell."""
    if len(text) <= REPETITION_WINDOW:
        return False
    window = text[-REPETITION_WINDOW:].encode()
    return len(window) > REPETITION_FACTOR * len(zlib.compress(window, 9))


def prefix_cache_hit_rate(samples: Sequence[Sample]) -> float | None:
    """Cached over all input tokens of the calls that made ``samples``; None when nobody told."""
    told = [sample.prefix_use for sample in samples if sample.prefix_use is not None]
    input_tokens = sum(use.input_tokens for use in told)
    return sum(use.cached_tokens for use in told) / input_tokens if input_tokens else None
