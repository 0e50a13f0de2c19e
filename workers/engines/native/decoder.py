"""The transformer: one-token steps for all running requests, and prefill of new prompts.

Arithmetic follows the Hugging Face implementations of the supported families; in float32 the
log-probs agree to 1e-5. n running requests, P prompts, T tokens, H hidden, D head_dim.
"""

import torch
from torch.nn import functional

from workers.engines.native import experts
from workers.engines.native.kv import KvCache
from workers.engines.native.model_shape import ModelShape, inverse_frequencies
from workers.engines.native.spans import Spans
from workers.engines.native.weights import LayerWeights, WeightStore


class Decoder:
    """A decoder over a ``WeightStore``. Not thread-safe; the model thread owns it."""

    def __init__(
        self,
        shape: ModelShape,
        weights: WeightStore,
        max_positions: int,
        num_threads: int,
        fixed_shapes: bool,
    ) -> None:
        self.shape = shape
        self.weights = weights
        self.num_threads = num_threads
        self.fixed_shapes = fixed_shapes
        self._scale = shape.head_dim**-0.5
        self._cos, self._sin = _rope_tables(shape, max_positions, weights.dtype)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: KvCache) -> torch.Tensor:
        """Feed one token per slot; logits [n, V] of the next one.

        ``tokens`` and ``positions`` are [n] for the slots [0, n); attention reads the whole
        cache, of which the positions up to ``positions`` count.
        """
        # Waking a second thread costs more than it saves on anything but the matrix products.
        torch.set_num_threads(1)
        shape, n = self.shape, len(tokens)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        index = cache.write_index(positions)
        hidden_positions = torch.arange(cache.capacity) > positions.unsqueeze(1)
        mask = torch.zeros(n, cache.capacity, dtype=self.weights.dtype)
        mask.masked_fill_(hidden_positions, float("-inf"))
        mask = mask.repeat_interleave(shape.num_kv_heads, 0).unsqueeze(1)
        x = self.weights.embedding[tokens]
        routed: list[torch.Tensor] = []
        for number, layer in enumerate(self.weights.layers):
            qk, v = self._heads(self._norm(x, layer.input_norm), layer)
            qk = _rotate(qk, cos, sin)
            cache.append(number, index, qk[:, shape.num_heads :], v)
            keys, values = cache.whole(number, n)
            grouped = qk[:, : shape.num_heads].reshape(len(keys), -1, shape.head_dim)
            scores = torch.bmm(grouped, keys.transpose(1, 2))
            scores = torch.add(mask, scores, alpha=self._scale)
            mixed = torch.bmm(scores.softmax(-1), values).view(n, -1)
            x = x + self._linear(mixed, layer.output, layer.output_bias)
            x = x + self._feed_forward(self._norm(x, layer.post_norm), layer, routed)
        if cache.experts is not None:
            cache.experts[torch.arange(n), positions] = torch.stack(routed, 1).to(torch.int32)
        return self.logits(x)

    def prefill(
        self,
        tokens: torch.Tensor,
        cache: KvCache,
        first: int,
        want_hidden: bool,
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Write KV of ``tokens`` [P, T] (right-padded) into the slots from ``first`` on.

        ``starts`` [P]: tokens that each slot holds already and that come before these; none when
        omitted. Returns the last hidden states [P, T, H] when asked. Padding is harmless: a causal
        mask hides it from real tokens, and decoding overwrites it.
        """
        torch.set_num_threads(self.num_threads)
        shape, (num_prompts, length) = self.shape, tokens.shape
        attention = Spans.of(starts, num_prompts, length, cache, first)
        at = attention.positions.clamp(max=len(self._cos) - 1).flatten()
        cos, sin = self._cos[at].unsqueeze(1), self._sin[at].unsqueeze(1)
        x = self.weights.embedding[tokens.flatten()]
        split = (num_prompts, length, -1, shape.head_dim)
        routed: list[torch.Tensor] = []
        for number, layer in enumerate(self.weights.layers):
            qk, v = self._heads(self._norm(x, layer.input_norm), layer)
            q, k = _rotate(qk, cos, sin).split((shape.num_heads, shape.num_kv_heads), 1)
            q, k, v = (part.reshape(split).transpose(1, 2) for part in (q, k, v))
            attention.write(number, k, v)
            if number == shape.num_layers - 1 and not want_hidden and cache.experts is None:
                return None
            mixed = attention.attend(number, q, k, v, self._scale)
            mixed = mixed.transpose(1, 2).reshape(num_prompts * length, -1)
            x = x + self._linear(mixed, layer.output, layer.output_bias)
            x = x + self._feed_forward(self._norm(x, layer.post_norm), layer, routed)
        if cache.experts is not None:
            attention.write_experts(torch.stack(routed, 1).to(torch.int32))
        return x.view(num_prompts, length, -1) if want_hidden else None

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of final hidden states [..., H], in the weights' dtype."""
        return self._linear(self._norm(x, self.weights.final_norm), self.weights.head, None)

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        threads = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        y = functional.linear(x, weight, bias)
        torch.set_num_threads(threads)
        return y

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.shape.rms_eps)

    def _heads(self, x: torch.Tensor, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [T, heads + kv heads, D] before rotation, values [T, kv heads, D]."""
        shape = self.shape
        qkv = self._linear(x, layer.qkv, layer.qkv_bias)
        if shape.qk_norm == "full" and layer.q_norm is not None and layer.k_norm is not None:
            q, k, v = qkv.split((len(layer.q_norm), len(layer.k_norm), len(layer.k_norm)), -1)
            qkv = torch.cat((self._norm(q, layer.q_norm), self._norm(k, layer.k_norm), v), -1)
        if shape.clip_qkv is not None:
            qkv = qkv.clamp(-shape.clip_qkv, shape.clip_qkv)
        heads = qkv.unflatten(-1, (-1, shape.head_dim))
        split = shape.num_heads + shape.num_kv_heads
        qk, v = heads[:, :split], heads[:, split:]
        if shape.qk_norm == "head" and layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split((shape.num_heads, shape.num_kv_heads), 1)
            qk = torch.cat((self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)), 1)
        return qk, v

    def _feed_forward(
        self, x: torch.Tensor, layer: LayerWeights, routed: list[torch.Tensor]
    ) -> torch.Tensor:
        """Dense SwiGLU or experts on x [T, H]; expert ids are appended to ``routed``."""
        if self.shape.moe is not None and layer.router is not None:
            chosen, weights = experts.route(x, layer, self.shape.moe)
            routed.append(chosen)
            run = experts.run_all if self.fixed_shapes else experts.run_chosen
            return run(x, chosen, weights, layer)
        assert layer.gate_up is not None
        assert layer.down is not None
        gate, up = self._linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return self._linear(functional.silu(gate).mul_(up), layer.down, layer.down_bias)


def _rope_tables(
    shape: ModelShape, max_positions: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sign-folded sine [positions, D]: the first half of the sine is negated."""
    frequencies = torch.tensor(inverse_frequencies(shape.rope, shape.head_dim), dtype=torch.float32)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on x [T, heads, D] with cos, sin [T, 1, D]."""
    first, second = x.chunk(2, -1)
    return (x * cos).addcmul_(torch.cat((second, first), -1), sin)
