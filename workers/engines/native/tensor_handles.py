"""Opening a bucket of weights that lies in the shared memory of another process.

The payload is SGLang's, see ``workers.trainers.handles``. It is a pickle, of which nothing is made
but a tensor over shared memory and plain records of what lies where in it.
"""

import base64
import binascii
import io
import pickle
from typing import Any

import torch
from torch import Tensor

from workers.engines.native.answers import ServerError

LOAD_FORMAT = "flattened_bucket"
_DTYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64", "uint8", "bool")
_ALLOWED = frozenset(
    {
        ("types", "SimpleNamespace"),
        ("torch", "Size"),
        *(("torch", name) for name in _DTYPES),
        ("multiprocessing.reduction", "_rebuild_partial"),
        ("torch", "from_file"),
    }
)


class _HandleUnpickler(pickle.Unpickler):
    """Makes what ``_ALLOWED`` names, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a handle of tensors")
        return super().find_class(module, name)


def opened(payload: str) -> dict[str, Tensor]:
    """Name -> view of the shared memory.

    Raises:
        ServerError: the payload is no handle of a bucket, or its memory is gone.
    """
    try:
        content = _HandleUnpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
        flat: Tensor = content["flattened_tensor"]
        if flat.dtype != torch.uint8 or flat.dim() != 1:
            raise ValueError(f"the bucket is {flat.dtype} {list(flat.shape)}, not [bytes] uint8")
        return {
            meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).view(meta.shape)
            for meta in content["metadata"]
        }
    except (
        binascii.Error,
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        IndexError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ServerError(f"serialized_named_tensors[0] cannot be opened: {error}") from error
