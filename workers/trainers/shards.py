"""A tensor that is dealt to ranks, and this rank's part of it.

Sharding cuts along the first dimension into as many pieces of ceil(n / world) rows as there are
ranks; the last ones may be shorter or empty. A tensor that is not sharded is whole on every rank.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from workers.sources.expert_names import file_weights


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a part of ``tensor`` only."""
    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's rows, sharing memory with ``tensor``; ``tensor`` itself when not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All rows, on every rank; every rank calls it. Of a sharded tensor it is a copy."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def file_shapes(weights: Mapping[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Tensors without data, by the names that files use and in their order.

    Args:
        weights: tensors by their names in memory.
        model_type: the family, as ``config.json`` has it.
    """
    empty = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in weights.items()
    }
    return file_weights(empty, model_type)


@contextmanager
def gathered(
    weights: Mapping[str, Tensor], model_type: str
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Whole tensors by the names that files use, one tensor of ``weights`` in memory at a time.

    Every rank enters the context. What the block leaves over, or all of it when it fails, is
    gathered when it ends: the other ranks wait for it.
    """
    stream = _stream(weights, model_type)
    try:
        yield stream
    finally:
        for _ in stream:
            pass


def _stream(weights: Mapping[str, Tensor], model_type: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights.items():
        yield from file_weights({name: whole(tensor)}, model_type).items()
