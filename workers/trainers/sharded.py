"""A transformers causal LM dealt to ranks: FSDP2 over its blocks and over everything else.

    ShardedBody                    embeddings, last norm, head: gathered from the forward of a
    +- model.base_model            micro-batch to the end of its backward
       +- layers[i]                gathered for their own forward and backward; where all of them
                                   take little of a device's memory, some at a time and from their
                                   forward until their backward

The head is used outside the body's forward, chunk by chunk and differentiated by hand. So it
belongs to the outer module, whose parameters stay gathered between forward and backward: what the
chunks add to the head's gradient is there when the body's backward ends and reduces it. A tied head
is the embedding, in the same place.

The processor has more to do for every gathering and every sum of gradients than a GPU for those of
a small block, and must stay ahead of it for both to overlap. Hence several blocks at a time, and
each asks for the weights of the next ones before it computes.

Gradients are summed over ranks, never averaged: every rank divides by counts of the whole step.
With bfloat16 arithmetic blocks are gathered in bfloat16, which autocast would round them to anyway,
while the outer module stays in float32, and with it the residual stream; gradients are reduced in
float32. Master weights, their gradients and the optimizer's moments are float32 everywhere.
"""

from itertools import pairwise
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from models.errors import ConfigurationError
from workers.trainers.ranks import Ranks

_KEPT_SHARE = 1 / 32
"""Of a device's memory may be blocks that stay gathered until their backward: little beside what
layers keep for it, and every block is gathered once instead of twice."""
_UNIT_BYTES = 96 << 20
"""Of blocks that stay gathered, in the compute dtype: least that is gathered at a time."""


class ShardedBody(nn.Module):
    """Calls the base model; holds the whole causal LM so that its head is sharded with it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def config(self) -> Any:
        """The transformers configuration of the base model."""
        return self.model.base_model.config

    def forward(self, **inputs: Any) -> Any:
        """What the base model answers."""
        return self.model.base_model(**inputs)

    def release(self) -> None:
        """Drop what a forward without backward left gathered."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def stays_gathered(model: Any, compute_dtype: torch.dtype, ranks: Ranks) -> bool:
    """Whether all blocks, gathered, are a small part of the memory of every rank's device.

    Raises:
        ConfigurationError: the model has no list of blocks.
    """
    parameters = list(_blocks(model).parameters())
    device = parameters[0].device
    memory = psutil.virtual_memory().total
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    gathered = sum(p.numel() for p in parameters) * compute_dtype.itemsize
    too_large = torch.tensor(float(gathered > _KEPT_SHARE * memory))
    return float(ranks.all_reduce_max(too_large)) == 0


def shard(model: Any, compute_dtype: torch.dtype, *, stay: bool = False) -> ShardedBody:
    """Deal the parameters of ``model`` to all ranks, in place.

    Args:
        model: whole on every rank.
        compute_dtype: blocks are gathered in it.
        stay: whether blocks stay gathered from their forward to their backward, as on all ranks.

    Raises:
        ConfigurationError: the model has no list of blocks.
    """
    blocks = _blocks(model)
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if compute_dtype == torch.bfloat16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    units = _units(blocks, _UNIT_BYTES // compute_dtype.itemsize if stay else 0)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=not stay)
    body = ShardedBody(model)
    fully_shard(body, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for module in body.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for module, following in pairwise((body, *(unit[0] for unit in units))):
        assert isinstance(module, FSDPModule)
        assert isinstance(following, FSDPModule)
        module.set_modules_to_forward_prefetch([following])
    return body


def _blocks(model: Any) -> nn.ModuleList:
    blocks = getattr(model.base_model, "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ConfigurationError(
            f"{type(model).__name__} has no list of blocks named layers and cannot be dealt to "
            "several processes; set trainer.num_processes = 1"
        )
    return blocks


def _units(blocks: nn.ModuleList, least: int) -> list[list[nn.Module]]:
    """``blocks`` in their order, cut after every one that brings a unit to ``least`` elements."""
    units: list[list[nn.Module]] = []
    size = least
    for block in blocks:
        if size >= least:
            units.append([])
            size = 0
        units[-1].append(block)
        size += sum(p.numel() for p in block.parameters())
    return units
