"""FlashAttention-4 for documents laid end to end, on Hopper and newer (package ``flash-attn-4``).

Faster than torch's own kernel on such GPUs, which is FlashAttention-2. The package gives an
autograd function that torch.compile cannot take in as a whole; here its two kernels are operators
that it can. It compiles a kernel for every size of head at its first call, which takes seconds.
"""

import importlib
import warnings
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

PACKAGE = "flash-attn-4"
_INTERFACE = "flash_attn.cute.interface"
_GENERATIONS = (9, 10)  # Hopper, Blackwell
_SIZES = 32  # heads of 40 fail on Hopper


def missing(device: torch.device) -> str | None:
    """Why this attention cannot be had on ``device``; None if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in _GENERATIONS:
        return "it needs an NVIDIA GPU of the Hopper or Blackwell generation"
    try:
        _kernels()
    except (ImportError, AttributeError) as error:
        return f"the package {PACKAGE} is not usable here ({error}); install it with pip"
    return None


def attend(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float | None
) -> Tensor:
    """Causal attention [T, heads, D] within documents.

    Of query [T, heads, D], key and value [T, heads or a divisor of it, D], in half precision;
    ``offsets`` [N + 1] int32 are the documents' ends, ``longest`` tokens the most one has.
    ``scale``: of the scores, the inverse root of D when None. Differentiable; the gradient of the
    query is summed in no fixed order.
    """
    size = query.shape[-1]
    used = size**-0.5 if scale is None else scale
    if size % _SIZES:
        # Zeros add nothing to a score, and what they make of values is cut off.
        query, key, value = (pad(part, (0, -size % _SIZES)) for part in (query, key, value))
    attended: Tensor = _forward(query, key, value, offsets, longest, used)[0]
    return attended[..., :size]


@lru_cache
def _kernels() -> ModuleType:
    """The package's kernels, under the names by which torch's own registration calls them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of its compiler's own modules
        module = importlib.import_module(_INTERFACE)
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        getattr(module, name)
    return module


@torch.library.custom_op("perdure::flash4_forward", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [T, heads, D], and the logarithm of every query's normalizer [heads, T] float32."""
    out, normalizer = _kernels()._flash_attn_fwd(
        query,
        key,
        value,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=True,
        return_lse=True,
    )[:2]
    return out, normalizer


@_forward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    out = query.new_empty(query.shape)
    return out, query.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("perdure::flash4_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normalizer: Tensor,
    offsets: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, shaped as these."""
    q, k, v, d = (part.contiguous() for part in (query, key, value, gradient))
    dq, dk, dv = _kernels()._flash_attn_bwd(
        q,
        k,
        v,
        out,
        d,
        normalizer,
        softmax_scale=scale,
        causal=True,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
    )
    return dq, dk, dv


@_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normalizer: Tensor,
    offsets: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (part.new_empty(part.shape) for part in (query, key, value))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, offsets, longest, scale = inputs
    ctx.save_for_backward(query, key, value, *output, offsets)
    ctx.longest, ctx.scale = longest, scale
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    dq, dk, dv = _backward(gradient, *saved, ctx.longest, ctx.scale)
    return dq, dk, dv, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
