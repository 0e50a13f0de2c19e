"""How evenly an optimizer step's tokens were given to the experts of each routed layer.

Counts are of the step's training forwards over all ranks: every token of every document that goes
through the model, prompts and last tokens included, under replay those of the replayed choices.
A replica is one whole set of experts: ``ep`` consecutive ranks that share them, summed. Per layer,
with m the mean over experts: max / m, and the coefficient of variation std / m (population); a
layer without tokens has 0 for both, and all its experts are dead.

What a step hides, single forwards show: ``expert_balance``. A dispatch is one micro-batch on its
way through all routed layers; its skew is the sum over layers of the busiest expert's tokens,
divided by the sum over layers of the mean expert's: 1 when every layer is even.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.errors import ContractViolation
from workers.trainers.ranks import Ranks

ROUTER_LOAD = "router_load"
EXPERT_BALANCE = "expert_balance"
SCOPE = "optimizer_update_training_dispatch"

_TINY = torch.finfo(torch.float64).tiny


class LayerLoads:
    """Loads of layers. All fields are [..., layers]."""

    def __init__(self, counts: Tensor) -> None:
        """``counts``: [..., layers, experts] int64."""
        self.assignments = counts.sum(-1)
        self.largest = counts.amax(-1)
        self.dead = (counts == 0).sum(-1)
        exact = counts.double()
        mean = exact.mean(-1).clamp(min=_TINY)
        self.ratio = exact.amax(-1) / mean
        self.variation = exact.std(-1, correction=0) / mean


def router_load(counts: Tensor, names: Sequence[str], ep: int = 1) -> dict[str, Any]:
    """The ``summary``, ``layers`` and ``replicas`` of a ``router_load`` event.

    Args:
        counts: [ranks, layers, experts] int64 tokens that each expert was given.
        names: of the layers.
        ep: ranks that share one set of experts.

    Raises:
        ContractViolation: a negative count, or ranks that ``ep`` does not divide.
    """
    ranks = len(counts)
    if ep < 1 or ranks % ep:
        raise ContractViolation(
            f"router load: {ranks} ranks cannot be dealt to replicas of {ep} ranks each"
        )
    if bool((counts < 0).any()):
        raise ContractViolation("router load: an expert has a negative number of tokens")
    by_replica = counts.unflatten(0, (ranks // ep, ep)).sum(1)
    whole, replicas = LayerLoads(by_replica.sum(0)), LayerLoads(by_replica)
    return {
        "summary": _summary(whole, replicas),
        "layers": {
            name: {
                "assignments": int(whole.assignments[layer]),
                "experts": counts.shape[-1],
                "max_expert_load": int(whole.largest[layer]),
                "dead_experts": int(whole.dead[layer]),
                "max_mean_load_ratio": float(whole.ratio[layer]),
                "load_cv": float(whole.variation[layer]),
            }
            for layer, name in enumerate(names)
        },
        "replicas": ranks // ep,
    }


def _summary(whole: LayerLoads, replicas: LayerLoads) -> dict[str, float]:
    """The nine keys, over layers, and over replicas and layers."""
    return {
        "moe/max_expert_load": int(whole.largest.max()),
        "moe/dead_experts": int(whole.dead.sum()),
        "moe/dead_experts_max_per_layer": int(whole.dead.max()),
        "moe/load_cv_mean": float(whole.variation.mean()),
        "moe/load_cv_max": float(whole.variation.max()),
        "moe/max_mean_load_ratio": float(whole.ratio.max()),
        "moe/replica_load_cv_max": float(replicas.variation.max()),
        "moe/replica_max_mean_load_ratio": float(replicas.ratio.max()),
        "moe/replica_dead_experts_max_per_layer": int(replicas.dead.max()),
    }


def expert_balance(packs: Tensor, num_micros: int, ranks: Ranks) -> dict[str, Any]:
    """The values of an ``expert_balance`` event; the same on every rank.

    ``critical_work_proxy`` counts the tokens that a step would take if every layer of every forward
    waited for the busiest expert of any rank; no prediction of time.

    Args:
        packs: [packs, layers, experts] int64 tokens that each expert was given by this rank's
            micro-batches, without fillers.
        num_micros: micro-batches of each rank, fillers included.
        ranks: who else counts.
    """
    peaks = torch.zeros(num_micros, packs.shape[1], dtype=torch.double)
    peaks[: len(packs)] = packs.amax(-1)
    skews = peaks[: len(packs)].sum(-1) / packs.double().mean(-1).sum(-1).clamp(min=_TINY)
    own = torch.tensor([len(skews), float(skews.sum())], dtype=torch.double)
    count, total = ranks.all_reduce_sum(own).tolist()
    largest = skews.max() if len(skews) else skews.new_zeros(())
    most = ranks.all_reduce_max(torch.cat([largest[None], peaks.flatten()]))
    return {
        "packs_per_rank": num_micros,
        "dispatches": int(count),
        "slots": packs.shape[-1],
        "skew_mean": total / max(count, 1.0),
        "skew_max": float(most[0]),
        "max_slot_assignments": int(most[1:].max()),
        "critical_work_proxy": int(most[1:].sum()),
    }
