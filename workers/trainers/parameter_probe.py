"""What a diagnostic optimizer step records of the parameters of one rank, by kind.

Gradient norms are taken before clipping. The change of the weights is sampled at no more than 256
entries of each parameter, evenly spread. Both are local, never norms over ranks.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from configs.run import RunSpec
from workers.trainers.shards import local_part

ROUTER, EXPERT, DENSE = "router", "expert", "dense"
_METRICS = "train/rank0_local_pre_optimizer/"
_SAMPLES = 256


class ParameterProbe:
    """Made between backward and step; asked for the updates after the step."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self.gradients = _gradient_norms(self._parameters)
        """L2 norm of the gradients of each kind of parameter that there is."""
        self._before = {name: _spread(p).clone() for name, p in self._parameters.items()}

    @classmethod
    def due(cls, spec: RunSpec, completed_steps: int, model: nn.Module) -> "ParameterProbe | None":
        """A probe when the step after ``completed_steps`` is a diagnostic one."""
        interval = spec.core.diagnostic_interval
        return cls(model) if interval and (completed_steps + 1) % interval == 0 else None

    def metrics(self) -> dict[str, float]:
        """The gradient norms as ``train/rank0_local_pre_optimizer/*``; the first rank's count."""
        return {f"{_METRICS}{kind}/l2": norm for kind, norm in self.gradients.items()}

    @torch.no_grad()
    def updates(self) -> dict[str, dict[str, Any]]:
        """How far the sampled entries have moved, by kind of parameter."""
        moved: dict[str, list[Tensor]] = {}
        for name, parameter in self._parameters.items():
            change = (_spread(parameter) - self._before[name]).abs().double()
            moved.setdefault(category(name), []).append(change)
        found = {kind: torch.cat(changes) for kind, changes in sorted(moved.items())}
        return {
            kind: {
                "entries": len(changes),
                "changed": int((changes > 0).sum()),
                "mean_abs": float(changes.mean()),
                "max_abs": float(changes.max()),
            }
            for kind, changes in found.items()
            if len(changes)
        }


def category(name: str) -> str:
    """Kind of a parameter by its transformers name, e.g. ``model.layers.0.mlp.gate.weight``."""
    parts = name.split(".")
    if "experts" in parts:
        return EXPERT
    return ROUTER if "gate" in parts or "router" in parts else DENSE


@torch.no_grad()
def _gradient_norms(parameters: dict[str, nn.Parameter]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            norm = float(torch.linalg.vector_norm(local_part(parameter.grad)))
            squares[category(name)] = squares.get(category(name), 0.0) + norm**2
    return {kind: math.sqrt(total) for kind, total in sorted(squares.items())}


def _spread(parameter: nn.Parameter) -> Tensor:
    flat = local_part(parameter.detach()).reshape(-1)
    return flat[:: max(1, -(-len(flat) // _SAMPLES))]
