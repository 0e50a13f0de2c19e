"""What the contract file says of routers: their load, by step and by pack, and their replay."""

import torch

from workers.trainers.ranks import agreed
from workers.trainers.replay_check import REPLAY_ROUTES, Phase
from workers.trainers.router_load import (
    EXPERT_BALANCE,
    ROUTER_LOAD,
    SCOPE,
    expert_balance,
    router_load,
)
from workers.trainers.update_scores import Judge


def record_load(judge: Judge, num_micros: int, *, step: int, rollout_id: int) -> dict[str, float]:
    """Append ``router_load`` and ``expert_balance`` of the optimizer step that was just taken.

    Args:
        judge: of the trainer.
        num_micros: micro-batches of each rank in the step, fillers included.
        step: number of the step, 1-based.
        rollout_id: index of the update.

    Returns:
        The nine ``train/moe/*`` metrics and the skew of packs; nothing for a dense model.
    """
    routing, ranks = judge.scorer.routing, judge.ranks
    if not routing.names:
        return {}
    where, packs = {"step": step, "rollout_id": rollout_id}, routing.counts()
    own = packs.sum(0)
    counts = torch.zeros(ranks.world, *own.shape, dtype=own.dtype)
    counts[ranks.rank] = own
    load = router_load(ranks.all_reduce_sum(counts), routing.names)
    event = {**where, "scope": SCOPE, "routing_replay": routing.replay, **load}
    judge.append(ROUTER_LOAD, event)
    balance = expert_balance(packs, num_micros, ranks)
    judge.append(EXPERT_BALANCE, {**where, **balance})
    metrics = {f"train/{key}": float(value) for key, value in load["summary"].items()}
    metrics["train/packing/expert_dispatch_skew_mean"] = balance["skew_mean"]
    metrics["train/packing/expert_dispatch_skew_max"] = balance["skew_max"]
    return metrics


def record_replay(judge: Judge, phase: Phase, rollout_id: int) -> None:
    """Append ``replay_routes`` of the micro-batches since the last call, where diagnostics are on.

    Raises:
        ContractViolation: a layer did not go by the supplied routes; on all ranks together.
    """
    check = judge.scorer.routing.check
    if check is None:
        return
    judge.append(REPLAY_ROUTES, check.event(phase, rollout_id))
    with agreed(judge.ranks):
        check.refuse_mismatch(phase)
    check.reset()
