"""AdamW in float32: one step with clipping, and how far it moved the parameters.

Everything here works on this rank's parts as plain tensors. Of hundreds of sharded tensors torch
would look at every one in Python, for each operation, while the GPU waits.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from configs.training import OptimizerSection
from models.errors import NonFiniteLoss
from workers.trainers.ranks import Ranks
from workers.trainers.shards import local_part

_SLICE = 1 << 20  # elements: temporaries of this size stay in the processor's cache
_GPU_SLICE = 1 << 27  # elements: few launches, 512 MiB for each temporary


def build_optimizer(
    parameters: Iterable[nn.Parameter], section: OptimizerSection
) -> torch.optim.AdamW:
    """The optimizer of ``[optimizer]``; the learning rate is set before each ``take_step``."""
    return torch.optim.AdamW(
        parameters,
        lr=section.learning_rate,
        betas=(section.adam_beta1, section.adam_beta2),
        eps=section.adam_eps,
        weight_decay=section.weight_decay,
        fused=True,
    )


@torch.no_grad()
def take_step(optimizer: torch.optim.AdamW) -> None:
    """Step with the gradients of this rank's parts, as ``optimizer.step`` would; fills its state.

    Every parameter must have a gradient.
    """
    for group in optimizer.param_groups:
        rows = []
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state.update(fresh_state(parameter))
            kept = (state["exp_avg"], state["exp_avg_sq"], state["step"])
            rows.append([local_part(each) for each in (parameter, parameter.grad, *kept)])
        if not rows:
            continue
        parameters, gradients, averages, squares, steps = (
            list(column) for column in zip(*rows, strict=True)
        )
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            gradients,
            averages,
            squares,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def fresh_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Moments and steps of a parameter that never stepped; moments are dealt as it is."""
    moments = parameter.detach()
    return {
        "exp_avg": torch.zeros_like(moments),
        "exp_avg_sq": torch.zeros_like(moments),
        "step": torch.zeros((), device=moments.device),
    }


@torch.no_grad()
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
    parameter q = (p + step) / (1 - lr * w) moved by lr * w * q as well. The corrections of both
    moments are numbers and taken out of the fraction.
    """
    squares: list[Tensor] = []
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        decay = group["lr"] * group["weight_decay"]
        for steps, parts in _by_steps(group["params"], optimizer):
            correction = math.sqrt(1 - beta2**steps)
            scale = group["lr"] / (1 - beta1**steps) * correction
            for p, m, v in _batches(parts):
                moved = _direction(m, v, group["eps"] * correction)
                if decay:
                    torch._foreach_mul_(moved, scale)
                    before = torch._foreach_add(p, moved)
                    torch._foreach_mul_(before, decay / (1 - decay))
                    torch._foreach_add_(moved, before)
                norms = torch._foreach_norm(moved)
                squares += norms if decay else torch._foreach_mul(norms, scale)
    if not squares:
        return _joint_norm(0.0, ranks)
    return _joint_norm(float(torch.stack(squares).double().norm()), ranks)


Part = tuple[Tensor, Tensor, Tensor]
"""Flat and of one length: parameter, first and second moment."""


def _by_steps(
    parameters: Sequence[nn.Parameter], optimizer: torch.optim.AdamW
) -> Iterator[tuple[float, list[Part]]]:
    """This rank's parts of the parameters that have stepped, by their number of steps."""
    stepped = [p for p in parameters if optimizer.state.get(p)]
    if not stepped:
        return
    counts = torch.stack([optimizer.state[p]["step"] for p in stepped]).tolist()  # one wait for all
    for steps in sorted(set(counts)):
        yield (
            steps,
            [
                (
                    local_part(p).detach().reshape(-1),
                    local_part(optimizer.state[p]["exp_avg"]).reshape(-1),
                    local_part(optimizer.state[p]["exp_avg_sq"]).reshape(-1),
                )
                for p, count in zip(stepped, counts, strict=True)
                if count == steps
            ],
        )


def _batches(parts: Iterable[Part]) -> Iterator[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """The same elements in lists of few enough elements for temporaries."""
    batch: list[Part] = []
    size = 0
    for part in parts:
        most = _GPU_SLICE if part[0].is_cuda else _SLICE
        pieces = [part]
        if len(part[0]) > most:
            pieces = list(zip(*(tensor.split(most) for tensor in part), strict=True))
        for piece in pieces:
            if batch and size + len(piece[0]) > most:
                yield _columns(batch)
                batch, size = [], 0
            batch.append(piece)
            size += len(piece[0])
    if batch:
        yield _columns(batch)


def _columns(batch: Sequence[Part]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    p, m, v = zip(*batch, strict=True)
    return list(p), list(m), list(v)


def _joint_norm(own: float, ranks: Ranks) -> float:
    """L2 norm of the parts of all ranks, from that of this rank's part."""
    if ranks.world == 1:
        return own
    return math.sqrt(float(ranks.all_reduce_sum(torch.tensor(own, dtype=torch.float64) ** 2)))


def _direction(m: list[Tensor], v: list[Tensor], eps: float) -> list[Tensor]:
    """Elements m / (sqrt(v) + eps): Adam's step but for a factor, in as few passes over memory."""
    divisors = torch._foreach_sqrt(v)
    torch._foreach_add_(divisors, eps)
    return list(torch._foreach_div(m, divisors))
