"""Checkpoint files of a trainer: safetensors and JSON, nothing that executes on load.

model.safetensors       parameters and persistent buffers, float32
optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME and step.NAME of every parameter
state.json              clock, completed steps, last applied update with its report

Several ranks write the first two in parts, with an index; see ``shard_files``. Any number of ranks
reads what any number wrote.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from activities.storage.atomic import make_folder, storage_errors
from models.base import Carried
from models.checkpoint import CheckpointFile, PolicyClock
from models.errors import ContractViolation
from models.update import UpdateReport
from workers.sources.tensor_file import write_tensors
from workers.trainers.ranks import Ranks, SingleRank, agreed
from workers.trainers.shard_files import (
    SHARDS_FILE,
    ShardIndex,
    opened_shards,
    own_tensors,
    shard_name,
)
from workers.trainers.weights import MODEL_FILE, named_weights

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_FILES = TypeAdapter(tuple[CheckpointFile, ...])


class TrainerState(Carried):
    """``state.json``. The scheduler is stateless: its position is the clock's completed steps."""

    schema_version: int = 1
    clock: PolicyClock
    last_report: UpdateReport | None = None
    """The last applied update: a repeated call after a restore gets the same report."""


def write_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    ranks: Ranks | None = None,
) -> tuple[CheckpointFile, ...]:
    """Write this rank's files into ``folder`` (made if missing).

    Returns:
        The files of all ranks with their digests.

    Raises:
        StorageFull: the device is full; on all ranks together.
    """
    ranks = ranks or SingleRank()
    own: list[str] = []
    with agreed(ranks), storage_errors(str(folder)):
        make_folder(folder)
        weights = named_weights(model)
        parts = {MODEL_FILE: weights, OPTIMIZER_FILE: _optimizer_tensors(model, optimizer)}
        for file, tensors in parts.items():
            own.append(shard_name(file, ranks.rank, ranks.world))
            write_tensors(folder / own[-1], own_tensors(tensors, ranks))
        documents: dict[str, Carried] = {STATE_FILE: state} if ranks.rank == 0 else {}
        if documents and ranks.world > 1:
            documents[SHARDS_FILE] = ShardIndex.of(weights, ranks.world)
        for name, document in documents.items():
            own.append(name)
            _write_document(folder / name, document)
        described = _FILES.dump_json(tuple(_describe(folder / name) for name in own)).decode()
    return tuple(file for text in ranks.exchange(described) for file in _FILES.validate_json(text))


def read_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks | None = None,
) -> TrainerState:
    """Fill ``model`` and ``optimizer`` from ``folder`` and return the rest.

    Raises:
        ContractViolation: a file is missing, or its tensors do not fit the model; on all ranks
            together.
    """
    ranks = ranks or SingleRank()
    with agreed(ranks):
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        index = None
        if SHARDS_FILE in names:
            index = ShardIndex.model_validate_json((folder / SHARDS_FILE).read_bytes())
        world = 1 if index is None else index.world
        _refuse_missing(folder, names, world)
        state = TrainerState.model_validate_json((folder / STATE_FILE).read_bytes())
        with opened_shards(folder, MODEL_FILE, index) as reader:
            weights = named_weights(model)
            reader.refuse_other_names(set(weights))
            for name, target in weights.items():
                reader.fill(target, name, ranks, name)
        _restore_moments(folder, index, dict(model.named_parameters()), optimizer, ranks)
    return state


def _refuse_missing(folder: Path, names: Iterable[str], world: int) -> None:
    parts = [
        shard_name(file, rank, world)
        for file in (MODEL_FILE, OPTIMIZER_FILE)
        for rank in range(world)
    ]
    missing = [name for name in (*parts, STATE_FILE) if name not in names]
    if missing:
        raise ContractViolation(f"checkpoint {folder} lacks {', '.join(missing)}")


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{key}.{name}": optimizer.state[parameter][key]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for key in _MOMENTS
    }


def _restore_moments(
    folder: Path,
    index: ShardIndex | None,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> None:
    """Rebuild the optimizer's state; a parameter without tensors never had a gradient."""
    optimizer.state.clear()
    with opened_shards(folder, OPTIMIZER_FILE, index) as reader:
        stepped = [name for name in parameters if f"{_MOMENTS[0]}.{name}" in reader.names]
        reader.refuse_other_names({f"{key}.{name}" for name in stepped for key in _MOMENTS})
        for name in stepped:
            parameter = parameters[name]
            state = {
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
                "step": torch.zeros((), device=parameter.device),
            }
            for key in _MOMENTS:
                like = None if key == "step" else name
                reader.fill(state[key], f"{key}.{name}", ranks, like)
            optimizer.state[parameter] = state


def _write_document(path: Path, document: Carried) -> None:
    with path.open("w") as file:
        file.write(document.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _describe(path: Path) -> CheckpointFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return CheckpointFile(path=path.name, sha256=digest, num_bytes=path.stat().st_size)
