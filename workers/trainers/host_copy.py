"""One version of the weights on the host: a folder can be written from it while an update runs."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from activities.storage.atomic import storage_errors
from workers.sources.folders import staged
from workers.trainers.ranks import Ranks, agreed
from workers.trainers.shards import file_shapes, gathered
from workers.trainers.weights import named_weights, num_weight_bytes, write_model_folder

_ALIGNMENT = 8
"""Bytes; enough for every type that a model has."""


class WeightsCopy:
    """The copy of a model that is trained: the first rank has it, the others help to make it."""

    def __init__(self, model: Any, ranks: Ranks, dtype: torch.dtype) -> None:
        """``dtype``: type of floating tensors in the copy."""
        self._model = model
        self._ranks = ranks
        self._dtype = dtype
        self._memory: HostMemory | None = None

    @property
    def num_bytes(self) -> int:
        """Of one copy, and of one export for engines."""
        return num_weight_bytes(self._model, self._dtype)

    def take(self) -> None:
        """Copy the current weights, over those of before. Every rank calls it."""
        weights, family = named_weights(self._model), self._model.config.model_type
        with agreed(self._ranks), gathered(weights, family) as data:
            if self._ranks.rank == 0:
                if self._memory is None:
                    self._memory = HostMemory(file_shapes(weights, family), self._dtype)
                self._memory.take(data)

    def write(self, companions: Path, folder: Path) -> None:
        """Write what was taken into the new ``folder``; any thread may.

        Args:
            companions: the prepared model, see ``fill_model_folder``.
            folder: appears by rename, complete.

        Raises:
            StorageFull, ConfigurationError: it cannot be written.
        """
        memory = self._memory
        assert memory is not None  # take has made it
        with storage_errors(str(folder)), staged(folder) as stage:
            content = iter(memory.tensors.items())
            write_model_folder(memory.shapes, companions, stage, self._dtype, content)


class HostMemory:
    """Memory for all tensors of a file, kept from one version to the next.

    Page-locked where there is a GPU: a copy from there then takes as long as the bus does.
    """

    def __init__(self, shapes: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Hold what ``shapes`` says: tensors without data by the names of the file, in its order.

        Floating ones are held as ``dtype``.
        """
        self.shapes = dict(shapes)
        types = [dtype if each.is_floating_point() else each.dtype for each in shapes.values()]
        sizes = [
            each.numel() * kind.itemsize for each, kind in zip(shapes.values(), types, strict=True)
        ]
        room = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        locked = torch.cuda.is_available()
        parts = torch.empty(sum(room), dtype=torch.uint8, pin_memory=locked).split(room)
        self.tensors = {
            name: part[:size].view(kind).view(each.shape)
            for (name, each), part, size, kind in zip(
                shapes.items(), parts, sizes, types, strict=True
            )
        }

    def take(self, data: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole tensors, all that there are; returns when they are here."""
        device = torch.device("cpu")
        for name, tensor in data:
            target, device = self.tensors[name], tensor.device
            # Cast where it lies: less goes over the bus.
            target.copy_(tensor.detach().to(target.dtype), non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
