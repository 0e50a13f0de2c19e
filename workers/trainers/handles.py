"""A handle of a bucket's memory, which an engine opens in its own process without a copy.

The payload of ``/update_weights_from_tensor`` with ``load_format = "flattened_bucket"`` is a
pickled ``{"flattened_tensor": tensor, "metadata": [...]}``. The tensor goes as a CUDA IPC handle,
or on a machine without a GPU as the name of a file in shared memory. The metadata need nothing but
attributes, so that this process needs no SGLang.
"""

import base64
import contextlib
import io
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from models.publication import TensorMeta
from workers.trainers.buckets import num_bytes

_DEVICE_ARGUMENT = 6
"""Place of the device's index among the arguments of ``reductions.rebuild_cuda_tensor``."""


class SharedMemory:
    """A tensor of bytes that other processes open by its handle, as long as this object lives."""

    def __init__(self, size: int, device: torch.device, file: Callable[[int], Path]) -> None:
        """[size] uint8 on ``device``; on the CPU it is the content of ``file(size)``, made anew."""
        self._file: Path | None = None
        if device.type == "cuda":
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
            return
        self._file = file(size)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.unlink(missing_ok=True)  # an engine may still have the former one open
        with self._file.open("xb") as created:
            created.truncate(size)
        self.data = torch.from_file(str(self._file), shared=True, size=size, dtype=torch.uint8)

    def handle(self, tensors: Sequence[TensorMeta]) -> str:
        """base64 of a handle of the bytes, which are complete and hold ``tensors`` in order."""
        if self.data.is_cuda:
            torch.cuda.synchronize(self.data.device)
        buffer = io.BytesIO()
        content = {"flattened_tensor": self.data, "metadata": _records(tensors)}
        _HandlePickler(buffer, self._file).dump(content)
        return base64.b64encode(buffer.getvalue()).decode()

    def close(self) -> None:
        """Give up the memory, and a folder that held nothing else; who has it open keeps it."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._file.parent.rmdir()


class _HandlePickler(ForkingPickler):
    """Names a tensor's GPU by its UUID, as each process counts its GPUs from 0."""

    def __init__(self, buffer: io.BytesIO, file: Path | None) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._file = file

    def reducer_override(self, value: Any) -> Any:
        if value is torch.from_file:
            return "from_file"  # by its name in torch, not as an attribute of a class of it
        if not isinstance(value, Tensor):
            return NotImplemented
        if self._file is not None:
            # Torch's own handles of shared memory need a process of their own.
            return partial(torch.from_file, dtype=value.dtype), (
                str(self._file),
                True,
                value.numel(),
            )
        rebuild, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
        end = _DEVICE_ARGUMENT + 1
        return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[end:])


def _records(tensors: Sequence[TensorMeta]) -> list[SimpleNamespace]:
    """What lies where, with the attributes of SGLang's ``FlattenedTensorMetadata``."""
    records = []
    end = 0
    for meta in tensors:
        begin, end = end, end + num_bytes(meta)
        records.append(
            SimpleNamespace(
                name=meta.name,
                shape=torch.Size(meta.shape),
                dtype=getattr(torch, meta.dtype),
                start_idx=begin,
                end_idx=end,
                numel=end - begin,
            )
        )
    return records
