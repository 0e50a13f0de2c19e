"""Writing safetensors files tensor by tensor: one small buffer, every tensor hashed on its way.

The format (huggingface/safetensors): eight bytes little-endian header length, a JSON header of
name -> dtype, shape, data offsets, padded with spaces to a multiple of eight, then the raw bytes.
Streaming avoids a second copy of the model in memory, which the library's own writer needs when
the file's dtype differs from the model's.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    data: Iterable[tuple[str, Tensor]] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Write ``tensors`` to ``path``, floating ones as ``dtype`` (default: their own).

    Args:
        path: The file; replaced.
        tensors: What the file holds, in its order.
        dtype: Type of floating tensors in the file.
        data: The same tensors in the same order, asked for one at a time; then ``tensors`` may be
            without data. Default: ``tensors``.
        metadata: What the header says besides.

    Returns:
        Name -> xxh3_64 hex of the bytes as written.
    """
    target = {
        name: dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        for name, tensor in tensors.items()
    }
    checksums: dict[str, str] = {}
    with path.open("wb") as file:
        file.write(_header(tensors, target, metadata or {}))
        for name, tensor in tensors.items() if data is None else data:
            content = bytes_of(tensor, target[name])
            checksums[name] = xxhash.xxh3_64_hexdigest(content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return checksums


def tensor_checksums(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, str]:
    """What ``write_tensors`` would return for ``tensors`` in ``dtype``; writes nothing."""
    return {
        name: xxhash.xxh3_64_hexdigest(
            bytes_of(tensor, dtype if tensor.is_floating_point() else tensor.dtype)
        )
        for name, tensor in tensors
    }


def _header(
    tensors: Mapping[str, Tensor], target: Mapping[str, torch.dtype], metadata: Mapping[str, str]
) -> bytes:
    """Length prefix and JSON header for tensors laid out in mapping order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * target[name].itemsize
        entries[name] = {
            "dtype": _DTYPE_NAMES[target[name]],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def bytes_of(tensor: Tensor, dtype: torch.dtype) -> Any:
    """The tensor's elements in row-major order as a buffer of bytes."""
    flat = tensor.detach().to(device="cpu", dtype=dtype).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
