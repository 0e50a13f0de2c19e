"""Exporting weights for engines: a Hugging Face folder, cast, hashed and renamed into place."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from activities.storage.atomic import storage_errors
from activities.wire.digest import weights_digest
from models.publication import WeightsRef
from workers.sources.folders import copy_companions, staged
from workers.sources.tensor_file import write_tensors
from workers.trainers.ranks import Ranks, SingleRank, agreed
from workers.trainers.shards import file_shapes, gathered

MODEL_FILE = "model.safetensors"
_SHARED_MEMORY = Path("/dev/shm")


def named_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in memory; a tied head appears once.

    ``named_parameters`` yields a shared tensor under its first name only, which is the embedding's.
    Files have these names too, but for fused experts; see ``expert_names``. With several ranks each
    tensor is this rank's part.
    """
    weights: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    seen: set[Tensor] = set()
    # One walk: those of torch itself take longer than a copy of all the tensors.
    for prefix, module in model.named_modules():
        place = f"{prefix}." if prefix else ""
        passing = module._non_persistent_buffers_set
        kept = {name: each for name, each in module._buffers.items() if name not in passing}
        for found, tensors in ((weights, module._parameters), (buffers, kept)):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in seen:
                    seen.add(tensor)
                    found[place + name] = tensor
    return weights | buffers


def fill_model_folder(
    model: Any,
    companions: Path,
    folder: Path,
    dtype: torch.dtype,
    data: Iterable[tuple[str, Tensor]],
) -> dict[str, str]:
    """Write ``model`` with the tokenizer and configuration files of ``companions``.

    Args:
        model: A transformers causal LM.
        companions: The prepared model folder; everything but weights is copied from it.
        folder: An empty folder.
        dtype: Type of the floating-point tensors in the file.
        data: The whole tensors of ``model`` by the names of files; see ``shards.gathered``.

    Returns:
        Name -> xxh3_64 hex of each tensor as written.
    """
    shapes = file_shapes(named_weights(model), model.config.model_type)
    return write_model_folder(shapes, companions, folder, dtype, data)


def write_model_folder(
    shapes: Mapping[str, Tensor],
    companions: Path,
    folder: Path,
    dtype: torch.dtype,
    data: Iterable[tuple[str, Tensor]],
) -> dict[str, str]:
    """``fill_model_folder`` of tensors that look like ``shapes``, which need no data."""
    copy_companions(companions, folder)
    config = json.loads((companions / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return write_tensors(folder / MODEL_FILE, shapes, dtype, data)


def num_weight_bytes(model: Any, dtype: torch.dtype) -> int:
    """Bytes of one export in ``dtype``."""
    return sum(tensor.numel() for tensor in named_weights(model).values()) * dtype.itemsize


def export_weights(
    model: Any,
    companions: Path,
    version: int,
    folder: Path,
    dtype: torch.dtype,
    ranks: Ranks | None = None,
) -> WeightsRef:
    """Write the weights of ``version`` into the new ``folder`` and describe them for engines.

    The folder appears by rename, complete: a reader never sees half of it. The first rank writes;
    it and the others hold one whole tensor at a time beside their parts.
    """
    ranks = ranks or SingleRank()
    described = ""
    family = model.config.model_type
    with (
        agreed(ranks),
        storage_errors(str(folder)),
        gathered(named_weights(model), family) as data,
    ):
        if ranks.rank == 0:
            with staged(folder) as stage:
                checksums = fill_model_folder(model, companions, stage, dtype, data)
            described = _describe(version, folder, checksums, dtype).model_dump_json()
    return WeightsRef.model_validate_json(ranks.exchange(described)[0])


def _describe(
    version: int, folder: Path, checksums: dict[str, str], dtype: torch.dtype
) -> WeightsRef:
    return WeightsRef(
        version=version,
        path=str(folder),
        digest=weights_digest(checksums),
        num_tensors=len(checksums),
        num_bytes=(folder / MODEL_FILE).stat().st_size,
        dtype=str(dtype).removeprefix("torch."),
    )


def export_bases(root: str) -> tuple[Path, Path]:
    """Where trainers of the run at ``root`` may put exports: shared memory, temporary storage.

    Or one folder that engines on other hosts see as well, where ``PERDURE_EXPORT_DIR`` names it.
    """
    name = f"perdure-{hashlib.sha256(root.encode()).hexdigest()[:16]}"
    if named := os.environ.get("PERDURE_EXPORT_DIR"):
        return Path(named) / name, Path(named) / name
    return _SHARED_MEMORY / name, Path(tempfile.gettempdir()) / name


def own_exports(root: str, needed_bytes: int) -> Path:
    """A folder for this process's exports, in shared memory if it holds ``needed_bytes``.

    Containers often have 64 MiB of shared memory only. Folders that dead processes of the run left
    in either place are removed.
    """
    shared, temporary = export_bases(root)
    for base in (shared, temporary):
        _remove_dead(base)
    base = shared if _can_hold(shared.parent, needed_bytes) else temporary
    own = base / f"trainer-{os.getpid()}"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    return own


def _can_hold(folder: Path, needed_bytes: int) -> bool:
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return False
    return shutil.disk_usage(folder).free >= needed_bytes


def _remove_dead(base: Path) -> None:
    for other in base.glob("trainer-*"):
        pid = other.name.removeprefix("trainer-")
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(other, ignore_errors=True)
