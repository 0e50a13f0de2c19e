"""Routers of a mixture of experts in a transformers model: where they are, and their rule.

A router gives (logits [T, E], weights [T, k], experts [T, k]) for T tokens and E experts, of which
each token goes to k. Its rule: p = softmax(logits), the k experts of greatest p, weighted by p,
divided by the sum of the k where ``norm_topk_prob`` says so.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.errors import ConfigurationError

_MARKS = ("top_k", "num_experts", "norm_topk_prob", "weight")
_PROBE_TOKENS = 4
_PROBE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Router:
    """One routed layer."""

    name: str
    module: nn.Module
    experts: nn.Module
    """Is called with (hidden [T, H], experts [T, k], weights [T, k])."""
    num_experts: int
    top_k: int
    normalizes: bool

    def weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Weights [T, k] that the router's rule gives to the experts ``chosen`` [T, k]."""
        own = torch.softmax(logits, -1, dtype=torch.float32).gather(-1, chosen)
        if self.normalizes:
            own = own / own.sum(-1, keepdim=True)
        return own.to(logits.dtype)


def find_routers(model: nn.Module) -> tuple[Router, ...]:
    """The routers of a transformers model, first layer first; none in a dense model.

    Raises:
        ConfigurationError: routers of different sizes, or of another rule than the one above.
    """
    modules = dict(model.named_modules())
    routers = []
    for name, module in modules.items():
        experts = modules.get(f"{name.rpartition('.')[0]}.experts")
        if experts is not None and all(hasattr(module, mark) for mark in _MARKS):
            facts: Any = module
            router = Router(
                name, module, experts, facts.num_experts, facts.top_k, facts.norm_topk_prob
            )
            _refuse_other_rule(router)
            routers.append(router)
    sizes = {(router.num_experts, router.top_k) for router in routers}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"{type(model).__name__} has routers of different sizes (experts, top k): "
            f"{sorted(sizes)}; only equal ones can be trained"
        )
    return tuple(routers)


@torch.no_grad()
def _refuse_other_rule(router: Router) -> None:
    """Compare the router's weights with the rule's on a few random tokens."""
    weight: Any = router.module.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_PROBE_TOKENS, weight.shape[1], generator=generator).to(weight)
    logits, weights, chosen = router.module(hidden)
    gap = float((router.weights(logits, chosen) - weights).abs().max())
    if not gap <= _PROBE_TOLERANCE:
        raise ConfigurationError(
            f"the router {router.name} weighs experts by another rule than softmax, top k and "
            f"norm_topk_prob (weights differ by {gap:.3g}); such a model cannot be trained"
        )
