"""AdamW in float32: one step with clipping, and how far it moved the parameters."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from configs.training import OptimizerSection
from models.errors import NonFiniteLoss
from workers.trainers.ranks import Ranks
from workers.trainers.shards import local_part

_SLICE = 1 << 20  # elements: temporaries of this size stay in the processor's cache


def build_optimizer(
    parameters: Iterable[nn.Parameter], section: OptimizerSection
) -> torch.optim.AdamW:
    """The optimizer of ``[optimizer]``; the learning rate is set before each step."""
    return torch.optim.AdamW(
        parameters,
        lr=section.learning_rate,
        betas=(section.adam_beta1, section.adam_beta2),
        eps=section.adam_eps,
        weight_decay=section.weight_decay,
        fused=True,
    )


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float, ranks: Ranks) -> float:
    """Scale gradients so that their global L2 norm is at most ``limit`` (0: leave them).

    Args:
        parameters: whole with one rank, else each rank's parts.
        limit: of the norm over all ranks.
        ranks: who holds the other parts.

    Returns:
        The norm before clipping.

    Raises:
        NonFiniteLoss: the norm is NaN or infinite; nothing was changed.
    """
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    norm = _joint_norm(float(torch.nn.utils.get_total_norm(gradients, foreach=True)), ranks)
    if not math.isfinite(norm):
        raise NonFiniteLoss(f"the gradient norm is {norm}; the optimizer step was not taken")
    if 0 < limit < norm:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
    return norm


@torch.no_grad()
def last_step_norm(optimizer: torch.optim.AdamW, ranks: Ranks) -> float:
    """L2 norm of the step that all ranks just took, recomputed from the optimizer's state.

    With bias-corrected moments m and v: step = lr * m / (sqrt(v) + eps), and with decay w the old
    parameter q = (p + step) / (1 - lr * w) moved by lr * w * q as well.
    """
    total = 0.0
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        decay = group["lr"] * group["weight_decay"]
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state:
                continue
            steps = float(state["step"])
            rate = group["lr"] / (1 - beta1**steps)
            correction = math.sqrt(1 - beta2**steps)
            slices = zip(
                local_part(parameter).reshape(-1).split(_SLICE),
                local_part(state["exp_avg"]).reshape(-1).split(_SLICE),
                local_part(state["exp_avg_sq"]).reshape(-1).split(_SLICE),
                strict=True,
            )
            for p, m, v in slices:
                moved = _slice_step(m, v, rate, correction, group["eps"])
                if decay:
                    moved = moved + (p + moved) * (decay / (1 - decay))
                total += float(torch.linalg.vector_norm(moved)) ** 2
    return _joint_norm(math.sqrt(total), ranks)


def _joint_norm(own: float, ranks: Ranks) -> float:
    """L2 norm of the parts of all ranks, from that of this rank's part."""
    if ranks.world == 1:
        return own
    return math.sqrt(float(ranks.all_reduce_sum(torch.tensor(own, dtype=torch.float64) ** 2)))


def _slice_step(m: Tensor, v: Tensor, rate: float, correction: float, eps: float) -> Tensor:
    """Adam's step of one slice: rate * m / (sqrt(v) / correction + eps)."""
    return m.mul(rate).div_(v.sqrt().div_(correction).add_(eps))
