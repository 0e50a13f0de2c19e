"""Log-probs of response tokens, and their gradients, without ever holding a batch's logits.

The transformer body runs once over the packed rows; the language-model head then runs over chunks
of ``chunk_tokens`` scored positions. In training a chunk's loss is differentiated by hand through
the log-softmax and its logits are freed before the next chunk starts; the gradient at the body's
output is collected and the body is differentiated once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.trainers.document_attention import BLOCKS, DocumentBlocks, takes_blocks
from workers.trainers.log_softmax import CompiledSoftmax, LogSoftmax, SlicedSoftmax
from workers.trainers.packing import MicroBatch
from workers.trainers.replay_check import Phase
from workers.trainers.routing import Routing
from workers.trainers.sharded import ShardedBody
from workers.trainers.varlen_attention import Bounds

ChunkLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log-probs [n], entropies [n], token index [n]) -> scalar loss of the chunk."""

Look = Callable[[Tensor, Tensor], None]
"""(log-probs [N], token index [N]) of a whole micro-batch, before its loss."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """A causal language model seen as body and head, with how it is computed."""

    body: Any
    head: Any
    softmax: LogSoftmax
    chunk_tokens: int
    dtype: torch.dtype
    device: torch.device
    routing: Routing
    within_documents: bool
    """Whether the body takes the ends of documents instead of a mask."""
    longest_document: int | None
    """Of a compiled body: most tokens of a document."""

    @classmethod
    def of(
        cls,
        model: Any,
        temperature: float,
        chunk_tokens: int,
        dtype: torch.dtype,
        routing: Routing | None = None,
        body: ShardedBody | None = None,
        longest_document: int | None = None,
    ) -> "Scorer":
        """Split a transformers causal LM into its base model and its output embeddings.

        Without ``routing`` a mixture of experts goes by its own routers and nobody counts.
        ``body``: of a model that is dealt to several ranks. Then every call is one of all ranks.
        ``longest_document``: of a model with compiled layers; the log-softmax is compiled as well.
        """
        head = model.get_output_embeddings()
        device = head.weight.device
        softmax: LogSoftmax = SlicedSoftmax(temperature, head.weight.shape[0], device)
        if longest_document is not None:
            softmax = CompiledSoftmax(temperature)
        return cls(
            body=model.base_model if body is None else body,
            head=head,
            softmax=softmax,
            chunk_tokens=chunk_tokens,
            dtype=dtype,
            device=device,
            routing=routing or Routing(),
            within_documents=takes_blocks(model),
            longest_document=longest_document,
        )

    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N] in float32 of the batch's tokens, without gradients."""
        batch = batch.to(self.device)
        replayed = self.routing.micro_batch(batch, Phase.SCORING)
        with self._released(), torch.no_grad(), self._autocast(), replayed:
            return self._statistics(self._hidden(batch), batch)

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
        """Add the gradient of ``loss``, and of auxiliary losses of routers, to the parameters.

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
                with torch.no_grad():
                    logprobs, _ = self._statistics(leaf, batch)
                look(logprobs, batch.token_index)
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
        auxiliary = self.routing.auxiliary_loss(batch)
        if auxiliary is None:
            hidden.backward(leaf.grad)
        else:  # in one pass: layers that are computed again are so once
            torch.autograd.backward((hidden, auxiliary), (leaf.grad, None))

    def _statistics(self, hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N] of the batch's tokens from the body's output."""
        pieces = []
        chunks = zip(
            hidden.split(self.chunk_tokens), batch.targets.split(self.chunk_tokens), strict=True
        )
        for h, targets in chunks:
            logits = self.head(h)
            rows = self.softmax.rows
            for part, part_targets in zip(logits.split(rows), targets.split(rows), strict=True):
                pieces.append(self.softmax.forward(part, part_targets)[:2])
        logprobs, entropies = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Body output [N, H] at the positions that predict the scored tokens."""
        seen: dict[str, Any] = {}
        if batch.document_lengths and self.within_documents:
            seen[BLOCKS] = self._documents(batch.document_lengths)
        else:
            seen["attention_mask"] = batch.attention_bias(self.dtype)
        out = self.body(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **seen
        )
        hidden: Tensor = out.last_hidden_state
        return hidden.flatten(0, 1).index_select(0, batch.predictors)

    def _documents(self, lengths: tuple[int, ...]) -> DocumentBlocks | Bounds:
        """What tells the body where documents begin; compiled code is made for one kernel."""
        if self.longest_document is None:
            return DocumentBlocks(lengths, self.device)
        return Bounds.of(lengths, self.device, self.longest_document)

    def _logits_to_gradient(
        self, logits: Tensor, targets: Tensor, index: Tensor, loss: ChunkLoss
    ) -> None:
        """Overwrite logits [n, V] by the loss's gradient at them, a slice of rows at a time."""
        rows = self.softmax.rows
        slices = zip(logits.split(rows), targets.split(rows), index.split(rows), strict=True)
        for part, part_targets, part_index in slices:
            logprobs, entropies, kept = self.softmax.forward(part, part_targets)
            logprobs, entropies = logprobs.requires_grad_(), entropies.requires_grad_()
            with torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
                value = loss(logprobs, entropies, part_index)
            d_logprob, d_entropy = _gradients(value, logprobs, entropies)
            self.softmax.backward(
                part, part_targets, kept, entropies.detach(), d_logprob, d_entropy
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


def _gradients(value: Tensor, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``value`` [] at both, [n]; None for entropies that it does not depend on."""
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        value, (logprobs, entropies), allow_unused=True
    )
    at_logprobs, at_entropies = found
    return torch.zeros_like(logprobs) if at_logprobs is None else at_logprobs, at_entropies
