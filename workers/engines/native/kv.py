"""The KV cache: one dense prefix of slots, grown in steps and bounded by a byte budget.

Slot s of every tensor belongs to the s-th running request; running requests are always slots
[0, n). Per layer, K and V are [slots, kv heads, capacity, head_dim], and the capacity follows the
longest running request: attention always reads whole tensors, because a bfloat16 product over a
slice of a longer cache copies it first (four times slower, measured).
"""

import torch

from workers.engines.native.model_shape import ModelShape

CAPACITY_STEP = 32
"""Capacity is a multiple of this many tokens."""
SLOT_STEP = 16
"""Slots grow in multiples of this many requests."""


def round_up(value: int, step: int) -> int:
    """The smallest multiple of ``step`` that is at least ``value``."""
    return -(-value // step) * step


class KvCache:
    """Keys, values, token history and routed experts of the running requests."""

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, budget_bytes: int, keep_experts: bool
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.slots = 0
        self.capacity = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.tokens = torch.empty(0)  # [slots, capacity + 1] int64, by position
        self.logprobs = torch.empty(0)  # [slots, capacity + 1] float32
        self.experts: torch.Tensor | None = None  # [slots, capacity, sparse layers, top_k] int32
        self._keep_experts = keep_experts and shape.moe is not None
        size = torch.empty(0, dtype=dtype).element_size()
        self.bytes_per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * size
        self.max_tokens = budget_bytes // self.bytes_per_token
        """Slots times capacity never exceeds this."""

    def free(self) -> None:
        """Give all memory back; nothing may run. ``ensure`` and ``resize`` allocate again."""
        self.slots = self.capacity = 0
        self.keys, self.values = [], []
        self.tokens, self.logprobs, self.experts = torch.empty(0), torch.empty(0), None

    def fits(self, slots: int, capacity: int) -> bool:
        """Whether ``slots`` requests of up to ``capacity`` tokens stay inside the budget."""
        return slots * capacity <= self.max_tokens

    def ensure(self, slots: int, length: int, need: int, live: int) -> None:
        """Room for ``slots`` requests of ``length`` tokens, keeping the first ``live`` slots.

        ``need`` is what the longest request can still grow to: it bounds the spare room. The
        caller checked that slots x need fits. A cache twice as long as needed shrinks.
        """
        spare = max(CAPACITY_STEP, length // 8)
        wanted = round_up(min(max(need, length), length + spare), CAPACITY_STEP)
        if slots <= self.slots and length <= self.capacity < 2 * wanted:
            return
        rows = max(round_up(slots, SLOT_STEP), self.slots)
        if not self.fits(rows, wanted):
            rows, wanted = slots, max(length, min(wanted, self.max_tokens // slots))
        self.resize(rows, wanted, live)

    def resize(self, slots: int, capacity: int, live: int) -> None:
        """Reallocate layer by layer, so that at most one layer exists twice."""
        shape = self.shape
        size = (slots, shape.num_kv_heads, capacity, shape.head_dim)
        both = min(capacity, self.capacity)
        if not self.keys:
            nothing = torch.empty(0, dtype=self.dtype)
            self.keys = [nothing] * shape.num_layers
            self.values = [nothing] * shape.num_layers
        for tensors in (self.keys, self.values):
            for index, old in enumerate(tensors):
                # Zeros: a masked position has weight 0, and 0 times garbage could be NaN.
                new = torch.zeros(size, dtype=self.dtype)
                if live:
                    new[:live, :, :both] = old[:live, :, :both]
                tensors[index] = new
        self.tokens = _grown(self.tokens, (slots, capacity + 1), torch.int64, live)
        self.logprobs = _grown(self.logprobs, (slots, capacity + 1), torch.float32, live)
        if self._keep_experts and shape.moe is not None:
            sparse, top_k = len(shape.moe.sparse_layers), shape.moe.top_k
            old_experts = torch.empty(0) if self.experts is None else self.experts
            self.experts = _grown(old_experts, (slots, capacity, sparse, top_k), torch.int32, live)
        self.slots, self.capacity = slots, capacity

    def write_index(self, positions: torch.Tensor) -> torch.Tensor:
        """Flat row index [n * kv heads] of ``positions`` [n] in the slots [0, n)."""
        heads = torch.arange(len(positions) * self.shape.num_kv_heads)
        return heads * self.capacity + positions.repeat_interleave(self.shape.num_kv_heads)

    def append(self, layer: int, index: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write one token per slot: k, v [n, kv heads, head_dim] at rows ``index``."""
        head_dim = self.shape.head_dim
        self.keys[layer].view(-1, head_dim).index_copy_(0, index, k.reshape(-1, head_dim))
        self.values[layer].view(-1, head_dim).index_copy_(0, index, v.reshape(-1, head_dim))

    def whole(self, layer: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_slots * kv heads, capacity, head_dim] as views."""
        heads, head_dim = num_slots * self.shape.num_kv_heads, self.shape.head_dim
        keys = self.keys[layer].view(-1, self.capacity, head_dim)[:heads]
        values = self.values[layer].view(-1, self.capacity, head_dim)[:heads]
        return keys, values

    def fill(self, layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write prefilled k, v [P, kv heads, T, head_dim] to the slots from ``first`` on."""
        last, length = first + k.shape[0], k.shape[2]
        self.keys[layer][first:last, :, :length] = k
        self.values[layer][first:last, :, :length] = v

    def put(
        self, layer: int, first: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write k, v [P, kv heads, T, head_dim] at ``positions`` [P, T] of slots from ``first`` on.

        Which of several tokens with one position stays is open: only padding has such.
        """
        slots = torch.arange(first, first + len(positions)).unsqueeze(1)
        self.keys[layer][slots, :, positions] = k.transpose(1, 2)
        self.values[layer][slots, :, positions] = v.transpose(1, 2)

    def share(self, sources: list[int], first: int, length: int) -> None:
        """Copy the first ``length`` tokens of slots ``sources`` to the slots from ``first`` on."""
        last, picked = first + len(sources), torch.tensor(sources)
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[first:last, :, :length] = tensor[picked, :, :length]
        if self.experts is not None:
            self.experts[first:last, :length] = self.experts[picked, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Move one request's first ``length`` tokens into another slot."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]
        self.tokens[target] = self.tokens[source]
        self.logprobs[target] = self.logprobs[source]
        if self.experts is not None:
            self.experts[target, :length] = self.experts[source, :length]


def _grown(old: torch.Tensor, size: tuple[int, ...], dtype: torch.dtype, live: int) -> torch.Tensor:
    new = torch.zeros(size, dtype=dtype)
    if live:
        both = min(size[1], old.shape[1])
        new[:live, :both] = old[:live, :both]
    return new
