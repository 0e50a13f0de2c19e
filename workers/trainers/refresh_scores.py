"""How far trainer and behavior policy are apart when responses span several policy versions.

A response that lived through a publication has an older prefix and a newer rest:

    tokens        t0 t1 t2 t3 | t4 t5 t6 t7 t8 t9      spans [(5, 0, 4), (7, 4, 10)]
    kind     historical prefix | latest forward        replay version 7

The latest forward is the one that made the last token; the prefix was sampled by versions before
it. With delta = trainer log-prob before the update - behavior log-prob, each kind reports mean and
largest |delta| and the share of tokens whose weight exp(delta) the truncation changes. Both kinds
contain policy age as well as numerical differences. The event is of one rank and its samples, the
metrics are over all ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workers.trainers.batch import TrainingBatch
from workers.trainers.loss import LossSettings
from workers.trainers.ranks import Ranks

REFRESH_SCORES = "refresh_scores"
HISTORICAL_PREFIX = "historical_prefix"
LATEST_FORWARD = "latest_forward"


def refresh_scores(
    batch: TrainingBatch,
    members: Sequence[int],
    old: Tensor,
    settings: LossSettings,
    ranks: Ranks,
    *,
    rollout_id: int,
    policy_version: int,
) -> dict[str, Any]:
    """The values of one ``refresh_scores`` event.

    Args:
        batch: the collection, N response tokens.
        members: this rank's samples of it.
        old: [N] the trainer's log-probs before the update; NaN where a token is not in the loss, or
            another rank's.
        settings: where importance weights are truncated.
        ranks: over whom numbers are; the only rank for those of this one.
        rollout_id: index of the update.
        policy_version: completed optimizer steps before the update.

    Returns:
        Counts, the share of active tokens that the current policy sampled, and one object for each
        kind of tokens that is there.
    """
    old = old.cpu()
    active = ~old.isnan()
    versions, replay = batch.versions.sampled_by[active], batch.versions.replay[active]
    delta = old[active].double() - batch.behavior[active].double()
    kinds = {HISTORICAL_PREFIX: versions < replay, LATEST_FORWARD: versions == replay}
    own = [_sums(delta[chosen], settings) for chosen in kinds.values()]
    own.append(_sums(delta[versions == policy_version], settings))
    *sums, current = ranks.all_reduce_sum(torch.stack([row[:3] for row in own])).tolist()
    largest = ranks.all_reduce_max(torch.stack([row[3] for row in own])).tolist()
    mixed = int(batch.versions.mixed[list(members)].sum())
    responses = ranks.all_reduce_sum(torch.tensor([mixed, len(members)])).tolist()
    tokens = int(sum(count for count, *_ in sums))
    event: dict[str, Any] = {
        "rollout_id": rollout_id,
        "mixed_responses": responses[0],
        "response_count": responses[1],
        "active_tokens": tokens,
        "current_version_token_fraction": current[0] / max(tokens, 1),
    }
    for kind, (count, total, truncated), most in zip(kinds, sums, largest, strict=False):
        if count:
            event[kind] = {
                "tokens": int(count),
                "mean_abs_logratio": total / count,
                "max_abs_logratio": most,
                "tis_clip_fraction": truncated / count,
            }
    return event


def refresh_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """The same as ``train/refresh/*``; figures of a kind without tokens are left out."""
    rows = {
        "train/refresh/mixed_responses": float(event["mixed_responses"]),
        "train/refresh/current_version_token_fraction": event["current_version_token_fraction"],
    }
    for kind in (HISTORICAL_PREFIX, LATEST_FORWARD):
        for name, value in event.get(kind, {}).items():
            rows[f"train/refresh/{kind}/{name}"] = float(value)
    return rows


def _sums(delta: Tensor, settings: LossSettings) -> Tensor:
    """[4] of tokens with ``delta`` [n]: n, sum of |delta|, truncated weights, largest |delta|."""
    weight, size = torch.exp(delta), delta.abs()
    truncated = (weight < settings.tis_clip_low) | (weight > settings.tis_clip)
    largest = size.max() if len(size) else size.sum()
    return torch.stack([size.new_tensor(len(size)), size.sum(), truncated.double().sum(), largest])
