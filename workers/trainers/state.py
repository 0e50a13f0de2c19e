"""Checkpoint files of a trainer: safetensors and JSON, nothing that executes on load.

model.safetensors       parameters and persistent buffers, float32
optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME and step.NAME of every parameter
state.json              clock, completed steps, last applied update with its report
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from activities.storage.atomic import make_folder
from models.base import Carried
from models.checkpoint import CheckpointFile, PolicyClock
from models.errors import ContractViolation
from models.update import UpdateReport
from workers.sources.tensor_file import write_tensors
from workers.trainers.weights import MODEL_FILE, named_weights

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
STATE_FILES = (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE)
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class TrainerState(Carried):
    """``state.json``. The scheduler is stateless: its position is the clock's completed steps."""

    schema_version: int = 1
    clock: PolicyClock
    last_report: UpdateReport | None = None
    """The last applied update: a repeated call after a restore gets the same report."""


def write_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainerState
) -> tuple[CheckpointFile, ...]:
    """Write the three files into ``folder`` (made if missing) and return their digests."""
    make_folder(folder)
    write_tensors(folder / MODEL_FILE, named_weights(model))
    write_tensors(folder / OPTIMIZER_FILE, _optimizer_tensors(model, optimizer))
    with (folder / STATE_FILE).open("w") as file:
        file.write(state.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return tuple(_describe(folder / n) for n in STATE_FILES)


def read_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainerState:
    """Fill ``model`` and ``optimizer`` from ``folder`` and return the rest.

    Raises:
        ContractViolation: a file is missing, or its tensors do not fit the model.
    """
    missing = [name for name in STATE_FILES if not (folder / name).is_file()]
    if missing:
        raise ContractViolation(f"checkpoint {folder} lacks {', '.join(missing)}")
    state = TrainerState.model_validate_json((folder / STATE_FILE).read_bytes())
    weights = named_weights(model)
    _fill(folder / MODEL_FILE, weights)
    _restore_moments(folder / OPTIMIZER_FILE, dict(model.named_parameters()), optimizer)
    return state


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{key}.{name}": optimizer.state[parameter][key]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for key in _MOMENTS
    }


@torch.no_grad()
def _fill(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Copy every tensor of the file into the target of the same name."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        _same_names(path, names, set(targets))
        for name, target in targets.items():
            tensor = file.get_tensor(name)
            if tensor.shape != target.shape:
                raise ContractViolation(
                    f"{path}: {name} has shape {tuple(tensor.shape)}, the model's is "
                    f"{tuple(target.shape)}"
                )
            target.copy_(tensor)


def _restore_moments(
    path: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Rebuild the optimizer's state; a parameter without tensors never had a gradient."""
    optimizer.state.clear()
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        stepped = [name for name in parameters if f"{_MOMENTS[0]}.{name}" in names]
        _same_names(path, names, {f"{key}.{name}" for name in stepped for key in _MOMENTS})
        for name in stepped:
            parameter = parameters[name]
            # a clone: the file's own pages must not stay mapped into the optimizer
            optimizer.state[parameter] = {
                key: file.get_tensor(f"{key}.{name}").clone().to(parameter.device)
                for key in _MOMENTS
            }


def _same_names(path: Path, found: set[str], expected: set[str]) -> None:
    if found != expected:
        raise ContractViolation(
            f"{path} does not fit this model: missing {sorted(expected - found)[:3]}, "
            f"unexpected {sorted(found - expected)[:3]}"
        )


def _describe(path: Path) -> CheckpointFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return CheckpointFile(path=path.name, sha256=digest, num_bytes=path.stat().st_size)
