"""What tests ask processes of a ``RankPool`` to do as those of one tensor-parallel server."""

from collections.abc import Callable
from typing import Any

import torch
from cut_model import cut_parameters
from torch import Tensor, distributed

from workers.engines.sglang.live_weights import Tensors, xxh3_checksums
from workers.engines.sglang.tensor_parallel import ServerGroup, whole_checksums
from workers.trainers.process_ranks import ProcessRanks

Parameters = dict[str, Tensor]


def answer(
    ranks: ProcessRanks,
    files: Parameters,
    config: dict[str, Any],
    padding: int = 1,
    change: Callable[[Parameters, int], None] | None = None,
    size: int = 0,
    checksums: Callable[[Tensors], dict[str, str]] = xxh3_checksums,
) -> dict[str, str] | str:
    """Checksums of this process, or what it raised.

    ``size``: processes of the server, the first ones of the pool; the others answer nothing.
    """
    size = size or ranks.world
    members = distributed.new_group(list(range(size)), backend="gloo")
    if ranks.rank >= size:
        return {}
    parameters = dict(cut_parameters(files, config, ranks.rank, size, padding))
    if change is not None:
        change(parameters, ranks.rank)
    group = ServerGroup(ranks.rank, size, members, members)
    try:
        return whole_checksums(parameters.items(), config, group, checksums)
    except RuntimeError as error:
        return str(error)


def one_byte_of_a_part(parameters: Parameters, rank: int) -> None:
    """In the last process's columns of the first layer's output projection."""
    if rank == distributed.get_world_size() - 1:
        _flip(parameters["model.layers.0.self_attn.o_proj.weight"])


def one_byte_of_a_copy(parameters: Parameters, rank: int) -> None:
    """In the values that the last process holds, and the others do as well."""
    if rank == distributed.get_world_size() - 1:
        _flip(parameters["model.layers.0.self_attn.qkv_proj.weight"][-1])


def one_byte_of_a_whole(parameters: Parameters, rank: int) -> None:
    """In a norm, which every process has."""
    if rank == 0:
        _flip(parameters["model.norm.weight"])


def another_layout(parameters: Parameters, rank: int) -> None:
    """A process that was started with another type."""
    if rank == 1:
        name = "model.layers.0.mlp.down_proj.weight"
        parameters[name] = parameters[name].to(torch.float64)


def not_cut(parameters: Parameters, rank: int) -> None:
    """A layer that every process has whole, where it must be cut."""
    name = "model.layers.0.mlp.down_proj.weight"
    parameters[name] = torch.cat([parameters[name]] * distributed.get_world_size(), 1)


def fails_in_one(tensors: Tensors) -> dict[str, str]:
    """Takes one tensor, and then has no memory in the last process."""
    if distributed.get_rank() == distributed.get_world_size() - 1:
        next(iter(tensors))
        raise torch.OutOfMemoryError("no memory left")
    return xxh3_checksums(tensors)


def _flip(tensor: Tensor) -> None:
    tensor.view(-1).view(torch.uint8)[-1] ^= 1
