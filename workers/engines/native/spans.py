"""Where a prefill's tokens lie in the KV cache, and what they attend to."""

from dataclasses import dataclass
from typing import Self

import torch
from torch.nn import functional

from workers.engines.native.kv import KvCache


@dataclass(frozen=True, slots=True)
class Spans:
    """T tokens for each of P slots, behind those that a slot holds already."""

    cache: KvCache
    first: int
    """The first slot."""
    positions: torch.Tensor
    """[P, T] int64; of padding too, at most the cache's last position."""
    mask: torch.Tensor | None
    """[P, 1, T, K] bool: what each token sees of the slot's first K; None: nothing came before,
    and tokens see one another causally."""

    @classmethod
    def of(
        cls, starts: torch.Tensor | None, num_slots: int, length: int, cache: KvCache, first: int
    ) -> Self:
        """``length`` tokens behind ``starts`` [P] tokens of each slot; None: behind nothing."""
        steps = torch.arange(length)
        if starts is None:
            return cls(cache, first, steps.expand(num_slots, length), None)
        # Positions past the end are of padding: real tokens were given room.
        positions = (starts.unsqueeze(1) + steps).clamp_(max=cache.capacity - 1)
        seen = torch.arange(int(positions.max()) + 1)
        return cls(cache, first, positions, (seen <= positions.unsqueeze(2)).unsqueeze(1))

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep k, v [P, kv heads, T, head_dim]."""
        if self.mask is None:
            self.cache.fill(layer, self.first, k, v)
        else:
            self.cache.put(layer, self.first, self.positions, k, v)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[P, heads, T, head_dim] of q over what the slots hold, k and v included."""
        if self.mask is None:
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
        last, seen = self.first + len(q), self.mask.shape[-1]
        keys = self.cache.keys[layer][self.first : last, :, :seen]
        values = self.cache.values[layer][self.first : last, :, :seen]
        return functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=self.mask, scale=scale, enable_gqa=True
        )

    def write_experts(self, chosen: torch.Tensor) -> None:
        """Keep expert ids [P * T, sparse layers, top_k] int32."""
        assert self.cache.experts is not None
        slots = torch.arange(self.first, self.first + len(self.positions)).unsqueeze(1)
        kept = chosen.view(*self.positions.shape, *chosen.shape[1:])
        self.cache.experts[slots, self.positions] = kept
