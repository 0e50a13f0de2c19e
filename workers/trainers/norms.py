"""RMS norms by torch's own kernel, for layers that are not compiled.

transformers writes such a norm as six operations, and as many again in the backward pass, each of
which moves all of its elements through memory. Under autocast its float32 result is then cast for
every product that takes it. Here one kernel does the norm, and where only products follow its
result is cast once.

Found by what they compute, not by name: norms that scale by one plus their weight, or that subtract
a mean, stay as they are.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.trainers.routers import find_routers

_BEFORE_PRODUCTS = ("input_layernorm", "post_attention_layernorm")
"""Of a layer that has these two norms and no other between its parts."""
_PROBE_ROWS = 4
_PROBE_TOLERANCE = 1e-5  # of values around 1, in float32


def fuse_norms(model: Any) -> int:
    """Replace the RMS norms of a transformers causal LM on their instances; returns how many.

    A mixture of experts keeps float32 between norm and router, which decides by it.
    """
    cast = set() if find_routers(model) else _before_products(model)
    fused = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(eps, float) and _is_rms_norm(module, eps):
            module.forward = partial(_norm, module, eps, module in cast)
            fused += 1
    return fused


def _norm(module: Any, eps: float, for_products: bool, hidden: Tensor) -> Tensor:
    """Of the last dimension of ``hidden``, in float32 or better."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    kind = hidden.device.type
    autocast = for_products and torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False):
        weight = module.weight.to(exact)
        out = functional.rms_norm(hidden.to(exact), weight.shape, weight, eps)
        return out.to(torch.get_autocast_dtype(kind)) if autocast else out


def _before_products(model: Any) -> set[nn.Module]:
    """Norms whose result is read by products alone."""
    found: set[nn.Module] = set()
    for layer in model.modules():
        norms = {name: child for name, child in layer.named_children() if name.endswith("norm")}
        if set(norms) == set(_BEFORE_PRODUCTS):
            found.update(norms.values())
    return found


@torch.no_grad()
def _is_rms_norm(module: nn.Module, eps: float) -> bool:
    """Whether ``module`` computes on a probe what the kernel does."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or next(module.children(), None):
        return False
    steps = torch.linspace(-2.0, 3.0, _PROBE_ROWS * len(weight), device=weight.device)
    probe = steps.view(_PROBE_ROWS, -1).to(weight.dtype)
    found = module(probe)
    expected = functional.rms_norm(probe, weight.shape, weight, eps)
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= _PROBE_TOLERANCE * (1 + expected.abs().max()))
