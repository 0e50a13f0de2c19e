"""Checkpoint files of a trainer: safetensors and JSON, nothing that executes on load.

model.safetensors       parameters and persistent buffers, float32
optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME and step.NAME of every parameter
state.json              clock, completed steps, last applied update with its report

Several ranks write the first two in parts; see ``checkpoint_parts``. Any number of ranks reads what
any number wrote.
"""

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from activities.storage.atomic import make_folder, storage_errors
from models.base import Carried
from models.checkpoint import CheckpointFile, PolicyClock
from models.errors import ContractViolation
from models.update import UpdateReport
from workers.trainers.adamw import fresh_state
from workers.trainers.checkpoint_parts import PartReader, describe, part_name, write_parts
from workers.trainers.ranks import Ranks, SingleRank, agreed
from workers.trainers.weights import MODEL_FILE, named_weights

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_OLD_INDEX = "shards.json"
_FILES = TypeAdapter(tuple[CheckpointFile, ...])


class TrainerState(Carried):
    """``state.json``. The scheduler is stateless: its position is the clock's completed steps."""

    schema_version: int = 1
    clock: PolicyClock
    last_report: UpdateReport | None = None
    """The last applied update: a repeated call after a restore gets the same report."""
    num_parts: int = 1
    """How many ranks wrote it, each a part of every file of tensors."""


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
    with agreed(ranks), storage_errors(str(folder)):
        make_folder(folder)
        parts = {
            MODEL_FILE: named_weights(model),
            OPTIMIZER_FILE: _named(_moments(model, optimizer)),
        }
        own = {
            folder / part_name(file, ranks.rank, ranks.world): tensors
            for file, tensors in parts.items()
        }
        written = write_parts(own, ranks)
        if ranks.rank == 0:
            document = state.model_copy(update={"num_parts": ranks.world})
            _write_document(folder / STATE_FILE, document)
            written += (describe(folder / STATE_FILE),)
        described = _FILES.dump_json(written).decode()
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
    with agreed(ranks or SingleRank()):
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        state = _read_document(folder, names)
        parts = [
            part_name(file, rank, state.num_parts)
            for file in (MODEL_FILE, OPTIMIZER_FILE)
            for rank in range(state.num_parts)
        ]
        _refuse_missing(folder, names, parts)
        reader = PartReader(folder, parts)
        optimizer.state.clear()
        moments = _fresh_moments(model, reader.names)
        reader.fill({**named_weights(model), **_named(moments)})
        parameters = dict(model.named_parameters())
        optimizer.state.update({parameters[name]: moments[name] for name in moments})
    return state


def _read_document(folder: Path, names: Iterable[str]) -> TrainerState:
    _refuse_missing(folder, names, [STATE_FILE])
    if _OLD_INDEX in names:
        raise ContractViolation(
            f"checkpoint {folder} is in parts with an index {_OLD_INDEX}, which this version does "
            "not read; resume with the version that wrote it"
        )
    return TrainerState.model_validate_json((folder / STATE_FILE).read_bytes())


def _refuse_missing(folder: Path, names: Iterable[str], needed: Sequence[str]) -> None:
    missing = [name for name in needed if name not in names]
    if missing:
        raise ContractViolation(f"checkpoint {folder} lacks {', '.join(missing)}")


def _fresh_moments(model: nn.Module, held: Container[str]) -> dict[str, dict[str, Tensor]]:
    """Optimizer state to be filled, by parameter; one without moments never had a gradient."""
    return {
        name: fresh_state(parameter)
        for name, parameter in model.named_parameters()
        if f"{_MOMENTS[0]}.{name}" in held
    }


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Mapping[str, Tensor]]:
    """Optimizer state by parameter, of those that have stepped."""
    return {
        name: optimizer.state[parameter]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def _named(moments: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{key}.{name}": state[key] for name, state in moments.items() for key in _MOMENTS}


def _write_document(path: Path, document: Carried) -> None:
    with path.open("w") as file:
        file.write(document.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
