"""Log-probs and entropies of rows of logits, and the gradient through them, by hand.

With z = logits / temperature, p = softmax(z), H = -sum(p log p):

    d log p_t / d z_j = [j = t] - p_j          d H / d z_j = -p_j (log p_j + H)

Sums are in float32, or in float64 if the logits are. ``SlicedSoftmax`` keeps the log-probs of a few
rows at a time; ``CompiledSoftmax`` keeps one number a row and reads the logits again instead, which
is less to move where memory is the limit and the work of a row is one kernel.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from workers.trainers.decoder_layers import Backend

_CACHED_ELEMENTS = 1 << 21  # float32 temporaries of this size stay in a processor's cache
_GPU_ELEMENTS = 1 << 28  # 1 GiB for each float32 temporary, few launches for many rows


class LogSoftmax(Protocol):
    """Of logits [n, V] at a fixed temperature, with targets [n]."""

    @property
    def rows(self) -> int:
        """Rows that may be given at a time."""

    def forward(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs [n] of the targets, entropies [n], and what ``backward`` wants to have."""

    def backward(
        self,
        logits: Tensor,
        targets: Tensor,
        kept: Tensor,
        entropies: Tensor,
        d_logprob: Tensor,
        d_entropy: Tensor | None,
    ) -> None:
        """Overwrite ``logits`` by the gradient at them; ``kept`` is used up.

        Args:
            logits: as given to ``forward``.
            targets: as given to ``forward``.
            kept: of ``forward``.
            entropies: of ``forward``.
            d_logprob: [n] gradient at the log-probs.
            d_entropy: [n] gradient at the entropies; None where it is 0.
        """


class SlicedSoftmax:
    """Operation by operation."""

    def __init__(self, temperature: float, vocabulary: int, device: torch.device) -> None:
        self._temperature = temperature
        elements = _GPU_ELEMENTS if device.type == "cuda" else _CACHED_ELEMENTS
        self.rows = max(1, elements // vocabulary)

    @torch.no_grad()
    def forward(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``LogSoftmax``; keeps the log-probs [n, V]."""
        exact = _exact(logits)
        one = self._temperature == 1.0
        scaled = logits if one else logits.to(exact) / self._temperature
        with torch.autocast(logits.device.type, enabled=False):  # it would round sums to bfloat16
            log_p = torch.log_softmax(scaled, -1, dtype=exact)
            entropies = -torch.linalg.vecdot(log_p.exp(), log_p)
        return log_p.gather(-1, targets[:, None])[:, 0], entropies, log_p

    @torch.no_grad()
    def backward(
        self,
        logits: Tensor,
        targets: Tensor,
        kept: Tensor,
        entropies: Tensor,
        d_logprob: Tensor,
        d_entropy: Tensor | None,
    ) -> None:
        """See ``LogSoftmax``."""
        factor = -d_logprob[:, None]
        if d_entropy is not None:
            factor = factor - d_entropy[:, None] * (kept + entropies[:, None])
        gradient = kept.exp_().mul_(factor)
        gradient.scatter_add_(1, targets[:, None], d_logprob[:, None])
        if self._temperature != 1.0:
            gradient.div_(self._temperature)
        logits.copy_(gradient)


class CompiledSoftmax:
    """Each direction one compiled kernel, at most three times over the logits."""

    rows = 1 << 30

    def __init__(self, temperature: float, backend: str | Backend = "inductor") -> None:
        self._temperature = temperature
        self._forward = _compiled(_statistics, backend)
        self._backward = _compiled(_overwrite, backend)

    @torch.no_grad()
    def forward(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``LogSoftmax``; keeps log sum exp z [n]."""
        with torch.autocast(logits.device.type, enabled=False):
            found: tuple[Tensor, Tensor, Tensor] = self._forward(logits, targets, self._temperature)
        return found

    @torch.no_grad()
    def backward(
        self,
        logits: Tensor,
        targets: Tensor,
        kept: Tensor,
        entropies: Tensor,
        d_logprob: Tensor,
        d_entropy: Tensor | None,
    ) -> None:
        """See ``LogSoftmax``."""
        with torch.autocast(logits.device.type, enabled=False):
            self._backward(
                logits, targets, kept, entropies, d_logprob, d_entropy, self._temperature
            )


def _statistics(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    scaled = logits.to(_exact(logits)) / temperature
    total = scaled.logsumexp(-1)
    log_p = scaled - total[:, None]
    entropies = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropies, total


def _overwrite(
    logits: Tensor,
    targets: Tensor,
    total: Tensor,
    entropies: Tensor,
    d_logprob: Tensor,
    d_entropy: Tensor | None,
    temperature: float,
) -> None:
    log_p = logits.to(_exact(logits)) / temperature - total[:, None]
    factor = -d_logprob[:, None]
    if d_entropy is not None:
        factor = factor - d_entropy[:, None] * (log_p + entropies[:, None])
    columns = torch.arange(logits.shape[-1], device=logits.device)
    at_target = torch.where(columns == targets[:, None], d_logprob[:, None], 0.0)
    logits.copy_((log_p.exp() * factor + at_target) / temperature)


def _compiled(function: Callable[..., Any], backend: str | Backend) -> Callable[..., Any]:
    """``function`` of tensors with any number of rows."""
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, backend=backend)
    mark: Any = torch._dynamo.maybe_mark_dynamic

    def call(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor):
                mark(argument, 0)
        return compiled(*arguments)

    return call


def _exact(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
