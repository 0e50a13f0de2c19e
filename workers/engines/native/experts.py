"""The mixture-of-experts block: route each token to its top-k experts and add their answers."""

import torch
from torch.nn import functional

from workers.engines.native.model_shape import MoeShape
from workers.engines.native.weights import LayerWeights


def route(
    hidden: torch.Tensor, layer: LayerWeights, moe: MoeShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids [T, top_k] and their weights [T, top_k] for ``hidden`` [T, H].

    Softmax over all experts in float32, then top-k, then (``norm_topk_prob``) renormalized.
    """
    assert layer.router is not None
    probabilities = functional.linear(hidden, layer.router).float().softmax(-1)
    weights, chosen = probabilities.topk(moe.top_k, dim=-1)
    if moe.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights.to(hidden.dtype)


def run_chosen(
    hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, layer: LayerWeights
) -> torch.Tensor:
    """Sum of the chosen experts' answers [T, H]; each expert sees only its own tokens."""
    assert layer.experts_gate_up is not None
    assert layer.experts_down is not None
    result = torch.zeros_like(hidden)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=layer.experts_gate_up.shape[0]).tolist()
    tokens, scale = order // chosen.shape[1], weights.flatten()[order].unsqueeze(-1)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows = slice(start, start + count)
        start += count
        gate, up = functional.linear(hidden[tokens[rows]], layer.experts_gate_up[expert]).chunk(
            2, -1
        )
        answer = functional.linear(functional.silu(gate) * up, layer.experts_down[expert])
        result.index_add_(0, tokens[rows], answer * scale[rows])
    return result


def run_all(
    hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, layer: LayerWeights
) -> torch.Tensor:
    """The same sum with every expert on every token: shapes never depend on the routing."""
    assert layer.experts_gate_up is not None
    assert layer.experts_down is not None
    num_experts = layer.experts_gate_up.shape[0]
    dense = hidden.new_zeros(len(hidden), num_experts).scatter_(1, chosen, weights)
    gate, up = torch.matmul(hidden, layer.experts_gate_up.transpose(1, 2)).chunk(2, -1)
    answers = torch.bmm(functional.silu(gate) * up, layer.experts_down.transpose(1, 2))
    return (answers * dense.t().unsqueeze(-1)).sum(0)
