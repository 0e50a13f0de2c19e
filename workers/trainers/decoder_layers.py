"""How the decoder layers of a model are computed: again in the backward pass, compiled, or neither.

Both replace a layer's ``forward`` on the instance. Names of parameters stay as they are, and hooks,
those of sharding among them, run around what is replaced: a layer that is computed again finds its
weights gathered, and a router's hook is called again but does not count (``Routing``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.errors import ConfigurationError
from workers.trainers.document_attention import BLOCKS

Forward = Callable[..., Tensor]
"""(hidden [1, T, H], **options) -> hidden [1, T, H], as transformers has it."""

Backend = Callable[..., Any]
"""A compiler of torch.compile."""


def decoder_layers(model: Any, key: str) -> nn.ModuleList:
    """The layers of a causal LM, first one first.

    Raises:
        ConfigurationError: the model has no list of them; names ``key``, which asks for it.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigurationError(
            f"{type(model).__name__} has no list of decoder layers, which {key} needs; remove it"
        )
    return layers


def recompute_layers(model: Any) -> None:
    """Let every layer keep its input only; the backward pass computes it again.

    Without random numbers (dropout is off) the repetition has the same bits.
    """
    for layer in decoder_layers(model, "trainer.activation_checkpointing"):
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def compile_layers(model: Any, backend: str | Backend = "inductor") -> None:
    """Compile every layer for packs of documents of any length; all share what was compiled.

    A forward without gradients runs the code of one with gradients: a compiler that knows what the
    backward pass needs fuses, and so rounds, in other places. Of a frozen model let parameters ask
    for gradients, lest code of its own be compiled for it.

    Forwards without documents, of a probe or a filler, are computed as before. A layer that cannot
    be compiled as a whole raises when it is first called.
    """
    for layer in decoder_layers(model, "trainer.compile"):
        layer.forward = _for_packs(layer.forward, backend)


def _for_packs(plain: Forward, backend: str | Backend) -> Forward:
    compiled: Forward = torch.compile(plain, fullgraph=True, backend=backend)

    def forward(hidden: Tensor, **options: Any) -> Tensor:
        if options.get(BLOCKS) is None:
            return plain(hidden, **options)
        scoring = not torch.is_grad_enabled()
        if scoring:
            hidden = hidden.detach().requires_grad_()
        for part in (hidden, *(options.get("position_embeddings") or ())):
            _any_length(part, 1)
        _any_length(options[BLOCKS].offsets, 0)
        with torch.enable_grad():
            out = compiled(hidden, **options)
        return out.detach() if scoring else out

    return forward


def _any_length(tensor: Tensor, dimension: int) -> None:
    """One compilation is to serve every size of ``dimension``."""
    mark: Any = torch._dynamo.maybe_mark_dynamic
    mark(tensor, dimension)
