"""Exporting weights for engines: a Hugging Face folder, cast, hashed and renamed into place."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from activities.wire.digest import weights_digest
from models.publication import WeightsRef
from workers.sources.folders import copy_companions, staged
from workers.sources.tensor_file import write_tensors

MODEL_FILE = "model.safetensors"
_SHARED_MEMORY = Path("/dev/shm")


def named_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by Hugging Face name; a tied head appears once.

    ``named_parameters`` yields a shared tensor under its first name only, which is the embedding's.
    """
    weights: dict[str, Tensor] = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True)
    weights.update({k: v for k, v in model.named_buffers() if k in persistent})
    return weights


def fill_model_folder(
    model: Any, companions: Path, folder: Path, dtype: torch.dtype
) -> dict[str, str]:
    """Write ``model`` with the tokenizer and configuration files of ``companions``.

    Args:
        model: A transformers causal LM.
        companions: The prepared model folder; everything but weights is copied from it.
        folder: An empty folder.
        dtype: Type of the floating-point tensors in the file.

    Returns:
        Name -> xxh3_64 hex of each tensor as written.
    """
    copy_companions(companions, folder)
    config = json.loads((companions / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return write_tensors(folder / MODEL_FILE, named_weights(model), dtype)


def export_weights(
    model: Any, companions: Path, version: int, folder: Path, dtype: torch.dtype
) -> WeightsRef:
    """Write the weights of ``version`` into the new ``folder`` and describe them for engines.

    The folder appears by rename, complete: a reader never sees half of it.
    """
    with staged(folder) as stage:
        checksums = fill_model_folder(model, companions, stage, dtype)
    return WeightsRef(
        version=version,
        path=str(folder),
        digest=weights_digest(checksums),
        num_tensors=len(checksums),
        num_bytes=(folder / MODEL_FILE).stat().st_size,
        dtype=str(dtype).removeprefix("torch."),
    )


def exports_base(root: str) -> Path:
    """Where trainers of the run at ``root`` put exports: shared memory, else temporary storage."""
    shared = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
    base = _SHARED_MEMORY if shared else Path(tempfile.gettempdir())
    return base / f"perdure-{hashlib.sha256(root.encode()).hexdigest()[:16]}"


def own_exports(root: str) -> Path:
    """A folder for this process's exports; folders of dead processes of the run are removed."""
    base = exports_base(root)
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    for other in base.iterdir():
        pid = other.name.removeprefix("trainer-")
        if pid.isdigit() and int(pid) != os.getpid() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(other, ignore_errors=True)
    own = base / f"trainer-{os.getpid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    return own


def remove_exports(root: str) -> None:
    """Remove every export of the run at ``root``: for teardown, after its trainer has ended."""
    shutil.rmtree(exports_base(root), ignore_errors=True)
