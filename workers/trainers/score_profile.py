"""How far trainer and behavior log-probs are apart, as a profile: the ``scores`` event.

The gap of a token is |trainer before the update - behavior|, in nats. It is counted in bins with
inclusive upper edges, by the third of its response that the token is in (index * 3 // length) and
by the length of its response. A percentile is told by the upper edge of its bin; null: the bin has
none. All numbers are over all ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from models.errors import ContractViolation
from workers.trainers.batch import TrainingBatch
from workers.trainers.ranks import Ranks

SCORES = "scores"
EDGES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
_QUANTILES = {"p50_upper": 0.5, "p95_upper": 0.95, "p99_upper": 0.99}
_METRICS = "collection_score_"
_GROUPS = (
    *("first_third", "middle_third", "last_third"),
    *("length_le_1024", "length_1025_4096", "length_gt_4096"),
)


def score_profile(
    batch: TrainingBatch, old: Tensor, ranks: Ranks, *, rollout_id: int, source: str
) -> dict[str, Any]:
    """The values of one ``scores`` event.

    Args:
        batch: the collection, N response tokens.
        old: [N] the trainer's log-probs before the update; NaN where a token is not in the loss.
        ranks: who else scored tokens.
        rollout_id: index of the update.
        source: which forward made ``old``.

    Raises:
        ContractViolation: no rank scored an active token.
    """
    old = old.cpu()
    active = ~old.isnan()
    gap = (old[active].double() - batch.behavior[active].double()).abs()
    bins = torch.bucketize(gap, torch.tensor(EDGES, dtype=torch.float64))
    members = [bins == position for position in range(len(EDGES) + 1)]
    members += _groups(batch, active)
    own = torch.stack(
        [
            torch.stack([chosen.sum().double() for chosen in members]),
            torch.stack([gap[chosen].sum() for chosen in members]),
        ]
    )
    largest = torch.zeros(ranks.world, dtype=torch.float64)  # the sum has every rank's in its place
    largest[ranks.rank] = gap.max() if len(gap) else 0.0
    joint = ranks.all_reduce_sum(torch.cat([own.flatten(), largest]))
    (counts, sums), largest = joint[: own.numel()].view_as(own).tolist(), joint[own.numel() :]
    histogram = [int(x) for x in counts[: len(EDGES) + 1]]
    if sum(histogram) == 0:
        raise ContractViolation(
            f"update {rollout_id}: no active token was scored, so trainer and behavior policy "
            "cannot be compared (loss_mask leaves out every response token)"
        )
    named = zip(_GROUPS, counts[len(histogram) :], sums[len(histogram) :], strict=True)
    return {
        "rollout_id": rollout_id,
        "source": source,
        "active_tokens": sum(histogram),
        "mean_abs": sum(sums[: len(histogram)]) / sum(histogram),
        "max_abs": float(largest.max()),
        **{name: _upper_edge(histogram, share) for name, share in _QUANTILES.items()},
        "histogram_upper_edges": list(EDGES),
        "histogram_counts": histogram,
        "groups": {
            name: {"tokens": int(count), "mean_abs": total / count if count else None}
            for name, count, total in named
        },
    }


def score_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """The same as ``train/collection_score_*``; a percentile without an edge is an overflow."""
    rows = {
        f"train/{_METRICS}{name}": float(event[name])
        for name in ("mean_abs", "active_tokens", "max_abs")
    }
    for name in _QUANTILES:
        edge = event[name]
        if edge is not None:
            rows[f"train/{_METRICS}{name}"] = edge
        rows[f"train/{_METRICS}{name}_overflow"] = float(edge is None)
    return rows


def _groups(batch: TrainingBatch, active: Tensor) -> list[Tensor]:
    """Membership [n] of the active tokens in each of ``_GROUPS``."""
    lengths = batch.lengths
    starts = torch.tensor([sample.offset for sample in batch.samples], dtype=torch.long)
    length = lengths.repeat_interleave(lengths)[active]
    index = (torch.arange(batch.num_tokens) - starts.repeat_interleave(lengths))[active]
    third = index * 3 // length
    return [
        *(third == part for part in range(3)),
        length <= 1024,
        (length > 1024) & (length <= 4096),
        length > 4096,
    ]


def _upper_edge(histogram: list[int], share: float) -> float | None:
    """Upper edge of the first bin up to which at least ``share`` of all tokens are."""
    wanted, seen = share * sum(histogram), 0
    for edge, count in zip((*EDGES, None), histogram, strict=True):
        seen += count
        if seen >= wanted:
            return edge
    return None
