"""One version of the weights on the host: a folder is written from it while the trainer goes on."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from workers.trainers.weights import write_model_folder

_ALIGNMENT = 8
"""Bytes; enough for every type that a model has."""


class HostCopy:
    """Memory for all tensors of a file, kept from one version to the next.

    Page-locked where they come from a GPU: the copy then takes as long as the bus does.
    """

    def __init__(
        self, shapes: Mapping[str, Tensor], dtype: torch.dtype, *, page_locked: bool
    ) -> None:
        """Hold what ``shapes`` says.

        Args:
            shapes: tensors without data by the names of the file, in its order.
            dtype: type of the floating ones.
            page_locked: whether the memory is.
        """
        self._shapes = dict(shapes)
        self._dtype = dtype
        sizes = [
            _aligned(tensor.numel() * self._type(tensor).itemsize) for tensor in shapes.values()
        ]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=page_locked)
        self._tensors = {
            name: part[: tensor.numel() * self._type(tensor).itemsize]
            .view(self._type(tensor))
            .view(tensor.shape)
            for (name, tensor), part in zip(shapes.items(), memory.split(sizes), strict=True)
        }

    def take(self, data: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole tensors, all that there are; returns when they are here."""
        device = None
        for name, tensor in data:
            target = self._tensors[name]
            # Cast where it lies: less goes over the bus.
            target.copy_(tensor.detach().to(target.dtype), non_blocking=True)
            device = tensor.device
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def write(self, companions: Path, folder: Path) -> None:
        """Fill the empty ``folder``; ``companions``: see ``fill_model_folder``. Any thread may."""
        write_model_folder(self._shapes, companions, folder, self._dtype, self._stream())

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors.items()

    def _type(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
