"""Attention of documents laid end to end, by a kernel that knows where each of them begins.

torch's variable-length flash attention (https://arxiv.org/abs/2307.08691): nothing is padded, no
copy is made, and a score between two documents is never computed. It has half precision on NVIDIA
GPUs only; ``kernel_dtype`` says whether it can be used.
"""

import inspect
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from workers.trainers import flash4
from workers.trainers.packing import on_device

Kernel = Literal["torch", "flash4"]
"""Whose: torch's own, or that of a package for newer GPUs."""

_CAUSAL = (-1, 0)  # keys of any distance to the left, none to the right
_LARGEST_HEAD = 256
# torch 2.11 takes fewer key heads than query heads without being told
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class Bounds(NamedTuple):
    """Where N documents begin and end. Made once for all layers."""

    offsets: Tensor  # [N + 1] int32, from 0 to the number of tokens
    longest: int
    """Tokens of the longest document, or more."""

    @classmethod
    def of(
        cls, lengths: Sequence[int], device: torch.device, at_most: int | None = None
    ) -> "Bounds":
        """Of documents of ``lengths`` tokens, one after the other.

        ``at_most``: what to take for the longest, lest compiled code be made for every value.
        """
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(on_device(offsets, device), at_most or max(lengths))


def kernel_dtype(query: Tensor, value: Tensor) -> torch.dtype | None:
    """What the kernel computes these in; None if it does not take them.

    Autocast counts: norms and rotary embeddings hand over float32 where products are bfloat16.
    """
    if not query.is_cuda or not _has_kernel(query.device):
        return None
    size = query.shape[-1]
    if size != value.shape[-1] or size % 8 or size > _LARGEST_HEAD:
        return None
    cast_to = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    return cast_to if cast_to in (torch.bfloat16, torch.float16) else None


def head_size(config: Any) -> int:
    """Of a transformers configuration."""
    size: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return size


def kernel_takes(model: Any, dtype: torch.dtype) -> bool:
    """Whether every attention layer of a transformers model will be computed by the kernel.

    ``dtype``: of products.
    """
    parameter, size = next(model.parameters()), head_size(model.config)
    if getattr(model.config, "attn_logit_softcapping", None):
        return False
    fits = size % 8 == 0 and size <= _LARGEST_HEAD and dtype in (torch.bfloat16, torch.float16)
    return fits and bool(parameter.is_cuda) and _has_kernel(parameter.device)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Bounds,
    scale: float | None,
    kernel: Kernel = "torch",
) -> Tensor:
    """Causal attention [T, heads, D] within documents.

    Of query [T, heads, D], key and value [T, heads or a divisor of it, D], in half precision.
    ``scale``: of the scores, the inverse root of D when None. Differentiable; the gradient of the
    query is summed in no fixed order.
    """
    offsets, longest = bounds.offsets, bounds.longest
    if kernel == "flash4":
        return flash4.attend(query, key, value, offsets, longest, scale)
    attended: Any = varlen_attn(
        query,
        key,
        value,
        offsets,
        offsets,
        longest,
        longest,
        scale=scale,
        window_size=_CAUSAL,
        **_GROUPED,
    )
    result: Tensor = attended
    return result


@lru_cache
def _has_kernel(device: torch.device) -> bool:
    """Whether torch was built with it and the GPU is an Ampere or newer."""
    built = torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)
