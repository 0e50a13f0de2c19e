"""Log-probs of response tokens, and their gradients, without ever holding a batch's logits.

The transformer body runs once over the packed rows; the language-model head then runs over chunks
of ``chunk_tokens`` scored positions. In training a chunk's loss is differentiated by hand through
the log-softmax and its logits are freed before the next chunk starts; the gradient at the body's
output is collected and the body is differentiated once. With z = logits / temperature,
p = softmax(z), H = -sum(p log p):

    d log p_t / d z_j = [j = t] - p_j          d H / d z_j = -p_j (log p_j + H)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.trainers.document_attention import BLOCKS, DocumentBlocks, takes_blocks
from workers.trainers.packing import MicroBatch
from workers.trainers.replay_check import Phase
from workers.trainers.routing import Routing
from workers.trainers.sharded import ShardedBody

_SLICE_ELEMENTS = 1 << 21  # float32 temporaries of this size stay in the processor's cache

ChunkLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log-probs [n], entropies [n], token index [n]) -> scalar loss of the chunk."""

Look = Callable[[Tensor, Tensor], None]
"""(log-probs [N], token index [N]) of a whole micro-batch, before its loss."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """A causal language model seen as body and head, with how it is computed."""

    body: Any
    head: Any
    temperature: float
    chunk_tokens: int
    dtype: torch.dtype
    device: torch.device
    routing: Routing
    within_documents: bool
    """Whether the body takes the ends of documents instead of a mask."""

    @classmethod
    def of(
        cls,
        model: Any,
        temperature: float,
        chunk_tokens: int,
        dtype: torch.dtype,
        routing: Routing | None = None,
        body: ShardedBody | None = None,
    ) -> "Scorer":
        """Split a transformers causal LM into its base model and its output embeddings.

        Without ``routing`` a mixture of experts goes by its own routers and nobody counts.
        ``body``: of a model that is dealt to several ranks. Then every call is one of all ranks.
        """
        head = model.get_output_embeddings()
        called = model.base_model if body is None else body
        device = head.weight.device
        return cls(
            called,
            head,
            temperature,
            chunk_tokens,
            dtype,
            device,
            routing or Routing(),
            takes_blocks(model),
        )

    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N] in float32 of the batch's tokens, without gradients."""
        batch = batch.to(self.device)
        replayed = self.routing.micro_batch(batch, Phase.SCORING)
        with self._released(), torch.no_grad(), self._autocast(), replayed:
            hidden = self._hidden(batch)
            pieces = [
                _log_softmax_stats(self.head(h), targets, self.temperature)[:2]
                for h, targets in zip(
                    hidden.split(self.chunk_tokens),
                    batch.targets.split(self.chunk_tokens),
                    strict=True,
                )
            ]
        logprobs, entropies = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def logits(self, batch: MicroBatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Chunks of (logits [n, V] before the temperature, targets [n], token index [n])."""
        batch = batch.to(self.device)
        replayed = self.routing.micro_batch(batch, Phase.SCORING)
        with self._released():
            with torch.no_grad(), self._autocast(), replayed:
                hidden = self._hidden(batch)
            chunks = zip(
                hidden.split(self.chunk_tokens),
                batch.targets.split(self.chunk_tokens),
                batch.token_index.split(self.chunk_tokens),
                strict=True,
            )
            for h, targets, index in chunks:
                with torch.no_grad(), self._autocast():
                    logits = self.head(h)
                yield logits, targets, index

    def plain_logits(self, ids: Tensor) -> Tensor:
        """Logits [T, V] in CPU memory of one sequence ``ids`` [T] as it is, without gradients.

        In the master weights' float32, unless other ranks hold a part of them: what those send is
        in the compute dtype.
        """
        sharded = isinstance(self.body, ShardedBody)
        exact = torch.autocast(self.device.type, enabled=False)
        with self._released(), torch.no_grad(), self._autocast() if sharded else exact:
            out = self.body(input_ids=ids[None].to(self.device), use_cache=False)
            logits: Tensor = self.head(out.last_hidden_state[0])
            return logits.cpu()

    def backward(self, batch: MicroBatch, loss: ChunkLoss, look: Look | None = None) -> None:
        """Add the gradient of ``loss`` to the parameters.

        ``loss`` must be a sum over tokens: it is called with a slice of them at a time. What it
        has to know of the whole micro-batch before, ``look`` is shown, at the cost of the head's
        forward.
        """
        batch = batch.to(self.device)
        with self.routing.micro_batch(batch, Phase.TRAINING):
            self._backward(batch, loss, look)

    def _backward(self, batch: MicroBatch, loss: ChunkLoss, look: Look | None) -> None:
        with self._autocast():
            hidden = self._hidden(batch)
            self.routing.forward_ended()
            leaf = hidden.detach().requires_grad_()
            if look is not None:
                look(self._logprobs(leaf.detach(), batch), batch.token_index)
            chunks = zip(
                leaf.split(self.chunk_tokens),
                batch.targets.split(self.chunk_tokens),
                batch.token_index.split(self.chunk_tokens),
                strict=True,
            )
            for h, targets, index in chunks:
                logits = self.head(h)
                # the head's backward does not read its output: the gradient takes its place
                self._logits_to_gradient(logits.detach(), targets, index, loss)
                logits.backward(logits.detach())
                del logits
        hidden.backward(leaf.grad)

    def _logprobs(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        """Log-probs [N] of the batch's tokens from the body's output, chunk by chunk."""
        chunks = zip(
            hidden.split(self.chunk_tokens), batch.targets.split(self.chunk_tokens), strict=True
        )
        with torch.no_grad():
            pieces = [
                _log_softmax_stats(self.head(h), targets, self.temperature)[0]
                for h, targets in chunks
            ]
        return torch.cat(pieces)

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Body output [N, H] at the positions that predict the scored tokens."""
        seen: dict[str, Any] = {}
        if batch.document_lengths and self.within_documents:
            seen[BLOCKS] = DocumentBlocks(batch.document_lengths, self.device)
        else:
            seen["attention_mask"] = batch.attention_bias(self.dtype)
        out = self.body(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **seen
        )
        hidden: Tensor = out.last_hidden_state
        return hidden.flatten(0, 1).index_select(0, batch.predictors)

    def _logits_to_gradient(
        self, logits: Tensor, targets: Tensor, index: Tensor, loss: ChunkLoss
    ) -> None:
        """Overwrite logits [n, V] by the loss's gradient at them, a few rows at a time."""
        rows = max(1, _SLICE_ELEMENTS // logits.shape[-1])
        slices = zip(logits.split(rows), targets.split(rows), index.split(rows), strict=True)
        for part, part_targets, part_index in slices:
            logprobs, entropies, log_p = _log_softmax_stats(part, part_targets, self.temperature)
            logprobs.requires_grad_()
            entropies.requires_grad_()
            with torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
                value = loss(logprobs, entropies, part_index)
            d_logprob, d_entropy = torch.autograd.grad(
                value, (logprobs, entropies), allow_unused=True, materialize_grads=True
            )
            with torch.no_grad():
                part.copy_(
                    _through_log_softmax(
                        log_p,
                        entropies.detach(),
                        part_targets,
                        d_logprob,
                        d_entropy,
                        self.temperature,
                    )
                )

    @contextmanager
    def _released(self) -> Iterator[None]:
        """Forwards that no backward follows: what they gathered from other ranks is dropped."""
        try:
            yield
        finally:
            if isinstance(self.body, ShardedBody):
                self.body.release()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16
        )


@torch.no_grad()
def _log_softmax_stats(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [n] of ``targets``, entropies [n] and all log-probs [n, V].

    In float32, or in float64 if the logits are.
    """
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scaled = logits if temperature == 1.0 else logits.to(exact) / temperature
    with torch.autocast(logits.device.type, enabled=False):  # it would round the sums to bfloat16
        log_p = torch.log_softmax(scaled, -1, dtype=exact)
        entropies = -torch.linalg.vecdot(log_p.exp(), log_p)
    return log_p.gather(-1, targets[:, None])[:, 0], entropies, log_p


def _through_log_softmax(
    log_p: Tensor,
    entropies: Tensor,
    targets: Tensor,
    d_logprob: Tensor,
    d_entropy: Tensor,
    temperature: float,
) -> Tensor:
    """Gradient [n, V] at the logits; overwrites ``log_p``."""
    if bool((d_entropy == 0).all()):
        gradient = log_p.exp_().mul_(-d_logprob[:, None])
    else:
        factor = -d_logprob[:, None] - d_entropy[:, None] * (log_p + entropies[:, None])
        gradient = log_p.exp_().mul_(factor)
    gradient.scatter_add_(1, targets[:, None], d_logprob[:, None])
    return gradient if temperature == 1.0 else gradient.div_(temperature)
