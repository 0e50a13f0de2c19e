"""Attention within documents: a pack costs the sum of its documents' squares, not its own square.

In half precision on a GPU one kernel does it (``varlen_attention``). Elsewhere a pack's queries,
keys and values are cut at the ends of its documents and laid out as batches of rows, documents of
similar length together, padded on the right; then causal attention of each row is the document's
own, and what is computed for the padding is dropped. Everything else of the model, experts above
all, sees the pack without any padding.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from workers.trainers.varlen_attention import Bounds, Kernel, attend, kernel_dtype

_PREFIX = "documents_"
_FA4 = "fa4"  # transformers takes any name with "flash" in it for a package of its own list
BLOCKS = "document_blocks"
"""Keyword of a model's forward that carries the documents to its attention layers.

``DocumentBlocks``, or ``Bounds`` where it is settled that the kernel takes them: compiled
code makes no choice.
"""

Attention = Callable[..., tuple[Tensor, Any]]
"""(module, q, k, v, mask, **options) -> ([B, L, heads, D], weights), as transformers has it."""


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Where the T tokens of a pack go when its documents are padded."""

    rows: tuple[Tensor, ...]
    """Per block [documents, longest] places in the pack; padding repeats a document's first."""
    order: Tensor  # [T] place of each token among the blocks' rows, laid end to end

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "PaddedRows":
        """Blocks of documents whose lengths are within the same power of two."""
        starts = list(accumulate(lengths, initial=0))
        blocks: dict[int, list[int]] = {}
        for document, length in enumerate(lengths):
            blocks.setdefault(length.bit_length(), []).append(document)
        rows = []
        order = torch.empty(sum(lengths), dtype=torch.long)
        done = 0
        for documents in blocks.values():
            longest = max(lengths[document] for document in documents)
            places = torch.arange(longest).repeat(len(documents), 1)
            for row, document in enumerate(documents):
                start, length = starts[document], lengths[document]
                first = done + row * longest
                order[start : start + length] = torch.arange(first, first + length)
                places[row, length:] = 0
                places[row] += start
            done += places.numel()
            rows.append(places.to(device))
        return cls(tuple(rows), order.to(device))


@dataclass(frozen=True)
class DocumentBlocks:
    """The documents of a pack, laid out once for all layers, in the way that these need."""

    lengths: tuple[int, ...]
    """Tokens of each."""
    device: torch.device

    @cached_property
    def padded(self) -> PaddedRows:
        """For attention that knows rows of one length only."""
        return PaddedRows.of(self.lengths, self.device)

    @cached_property
    def bounds(self) -> Bounds:
        """For attention that takes documents of any length."""
        return Bounds.of(self.lengths, self.device)


def use_document_attention(model: Any, kernel: Kernel = "torch") -> None:
    """Let ``model`` take ``DocumentBlocks``; without them it computes as before, causally.

    ``kernel``: which one computes them, where one does.
    """
    base = model.config._attn_implementation
    if not base.startswith(_PREFIX):
        model.set_attn_implementation(f"{_PREFIX}{base if kernel == 'torch' else _FA4}")


def takes_blocks(model: Any) -> bool:
    """Whether ``use_document_attention`` was called for the model."""
    return str(model.config._attn_implementation).startswith(_PREFIX)


def _within_documents(base: Attention, kernel: Kernel | None) -> Attention:
    """``kernel``: which kernel for documents may take the place of ``base``."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """Of query [1, heads, T, D]; key and value may have fewer heads."""
        blocks: DocumentBlocks | Bounds | None = options.pop(BLOCKS, None)
        if blocks is None:
            return base(module, query, key, value, attention_mask, **options)
        if isinstance(blocks, Bounds):
            # nothing follows the product that makes values: they have the dtype of products
            return _by_kernel(query, key, value, blocks, value.dtype, kernel, options), None
        dtype = kernel_dtype(query, value) if kernel and not _beyond_kernel(options) else None
        if dtype is None or kernel is None:
            return attend_padded(base, module, query, key, value, blocks, **options), None
        return _by_kernel(query, key, value, blocks.bounds, dtype, kernel, options), None

    return attention


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Bounds,
    dtype: torch.dtype,
    kernel: Kernel | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention [1, T, heads, D] of query [1, heads, T, D], computed in ``dtype``."""
    q, k, v = (part.squeeze(0).transpose(0, 1).to(dtype) for part in (query, key, value))
    return attend(q, k, v, bounds, options.get("scaling"), kernel or "torch")[None]


def attend_padded(
    base: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: DocumentBlocks,
    **options: Any,
) -> Tensor:
    """Attention [1, T, heads, D] of query [1, heads, T, D], by ``base`` on padded rows."""
    done = []
    for rows in blocks.padded.rows:
        q, k, v = (
            part.squeeze(0)[:, rows].transpose(0, 1).contiguous() for part in (query, key, value)
        )
        done.append(base(module, q, k, v, None, **options)[0].flatten(0, 1))
    return torch.cat(done).index_select(0, blocks.padded.order)[None]


def _beyond_kernel(options: dict[str, Any]) -> bool:
    """Whether a layer asks for more than scaled causal attention; ``base`` knows what to do."""
    return any(options.get(key) for key in ("dropout", "softcap")) or (
        options.get("position_bias") is not None
    )


def _eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """The eager attention of the module's own family, which is causal by its mask only."""
    if attention_mask is None:
        length = query.shape[2]
        closed = query.new_full((length, length), torch.finfo(query.dtype).min)
        attention_mask = closed.triu(1)[None, None]
    own: Attention = importlib.import_module(type(module).__module__).eager_attention_forward
    return own(module, query, key, value, attention_mask, **options)


AttentionInterface.register(f"{_PREFIX}eager", _within_documents(_eager, kernel=None))
AttentionInterface.register(
    f"{_PREFIX}sdpa", _within_documents(sdpa_attention_forward, kernel="torch")
)
AttentionInterface.register(
    f"{_PREFIX}{_FA4}", _within_documents(sdpa_attention_forward, kernel="flash4")
)
