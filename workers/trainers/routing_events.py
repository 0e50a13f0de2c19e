"""What the contract file says of routers: ``router_load`` and ``replay_routes``."""

import torch

from workers.trainers.ranks import agreed
from workers.trainers.replay_check import REPLAY_ROUTES, Phase
from workers.trainers.router_load import ROUTER_LOAD, SCOPE, router_load
from workers.trainers.update_scores import Judge


def record_load(judge: Judge, *, step: int, rollout_id: int) -> dict[str, float]:
    """Append ``router_load`` of the optimizer step ``step`` (1-based) that was just taken.

    Returns:
        The nine ``train/moe/*`` metrics; nothing for a dense model.
    """
    routing, ranks = judge.scorer.routing, judge.ranks
    if not routing.names:
        return {}
    own = routing.counts()
    counts = torch.zeros(ranks.world, *own.shape, dtype=own.dtype)
    counts[ranks.rank] = own
    load = router_load(ranks.all_reduce_sum(counts), routing.names)
    event = {
        "step": step,
        "rollout_id": rollout_id,
        "scope": SCOPE,
        "routing_replay": routing.replay,
        **load,
    }
    judge.append(ROUTER_LOAD, event)
    return {f"train/{key}": float(value) for key, value in load["summary"].items()}


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
