"""What ranks do with the parts of a checkpoint in tests."""

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.distributed_c10d
from rank_cases import Arrays, Job, Outcome, live
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from models.checkpoint import PolicyClock
from workers.trainers.checkpoint_parts import PartReader, part_name, write_parts
from workers.trainers.shards import whole
from workers.trainers.state import TrainerState, read_state, write_state
from workers.trainers.weights import named_weights

FILE = "model.safetensors"


class Odd(nn.Module):
    """A tied weight of five rows, one of a single row, a number, and a buffer that is whole."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 3)
        self.narrow = nn.Linear(3, 1)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.randn(4))
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        return (self.head(hidden).sum() + self.narrow(hidden).sum()) * self.scale.sum()


def odd(ranks: Any, seed: int) -> tuple[Odd, torch.optim.AdamW]:
    """A model and its optimizer, dealt to the ranks where there are several."""
    model = Odd(seed)
    if ranks.world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks.world,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def save_odd(ranks: Any, folder: Path) -> Arrays:
    """Take two steps, save, and return everything whole."""
    model, optimizer = odd(ranks, seed=7)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([0, 3, 3])).backward()
        optimizer.step()
    clock = PolicyClock(completed_steps=2, published_step=0, next_rollout_id=2)
    with no_gathering():
        write_state(folder, model, optimizer, TrainerState(clock=clock), ranks)
    return contents(model, optimizer)


def load_odd(ranks: Any, folder: Path) -> Arrays:
    """Restore into a model of other values and return everything whole."""
    model, optimizer = odd(ranks, seed=8)
    with no_gathering():
        read_state(folder, model, optimizer, ranks)
    assert model.head.weight is model.embedding.weight
    return contents(model, optimizer)


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> Arrays:
    """Weights under their names, moments under theirs and ``/key``."""
    found = {name: array(tensor) for name, tensor in named_weights(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = array(value)
    return found


def array(tensor: Tensor) -> numpy.ndarray:
    return whole(tensor).detach().numpy().copy()


def write_rows(ranks: Any, folder: Path) -> None:
    """Parts of a tensor of seven rows."""
    module = nn.Linear(2, 7, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (ranks.world,)))
    path = folder / part_name(FILE, ranks.rank, ranks.world)
    write_parts({path: {"w": module.weight}}, ranks)


def read_rows(ranks: Any, folder: Path) -> None:
    """Read them back."""
    PartReader(folder, [path.name for path in folder.iterdir()]).fill({"w": torch.zeros(7, 2)})


def raw_parts(path: Path) -> dict[str, tuple[list[int], numpy.ndarray]]:
    """Of a file of float32 tensors: where each begins in the whole, and its elements.

    Read without any library: every byte belongs to the header or to one tensor.
    """
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    said = header.pop("__metadata__")
    offsets = json.loads(said["DCP_SHARDING_INFO"])
    found, end = {}, start
    for name, entry in header.items():
        begin, end_of_this = (start + offset for offset in entry["data_offsets"])
        assert begin == end
        assert entry["dtype"] == "F32"
        end = end_of_this
        values = numpy.frombuffer(content[begin:end], numpy.float32).reshape(entry["shape"])
        found[name] = (offsets[name]["saved_offsets"], values)
    assert end == len(content)
    return found


def live_without_pickle(ranks: Any, job: Job) -> Outcome:
    """``live`` where nothing can be unpickled."""
    with no_pickle():
        return live(ranks, job)


@contextmanager
def no_pickle() -> Iterator[None]:
    """Every way of reading a pickle raises."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (pickle, "load"),
            (pickle, "loads"),
            (pickle, "Unpickler"),
            (torch, "load"),
            (torch.distributed.distributed_c10d, "_unpickler"),
        ):
            patch.setattr(owner, name, _refused)
        yield


@contextmanager
def no_gathering() -> Iterator[None]:
    """A tensor that is put together from the parts of ranks raises."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", _refused)
        patch.setattr(DTensor, "redistribute", _refused)
        yield


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("nothing may call this here")
