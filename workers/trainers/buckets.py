"""Weights in buckets: some tensors, cast for engines, one after the other in one piece of memory.

::

    model (parameters, or parts of them) --plan--> names of every bucket
                                         --pack--> [bytes] on this rank's device --> an engine

A bucket takes tensors until the next one would carry it past the limit; a larger one has its own.
The model is never held a second time: one bucket and one whole tensor are alive at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from activities.wire.digest import weights_digest
from models.publication import TensorMeta
from workers.fingerprint import fingerprints
from workers.trainers.shards import file_shapes, gathered, is_sharded


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket, before it holds anything."""

    members: tuple[str, ...]
    """Names in memory."""
    tensors: tuple[TensorMeta, ...]
    """What they are in files and on the wire; all of one dtype, so that none needs filling bytes in
    front of it."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WireWeights:
    """The weights of a model as engines take them.

    ``weights`` are tensors by their names in memory (with several ranks: parts), ``family`` the
    model type of ``config.json``, ``dtype`` the type of floating tensors at the engines'.
    """

    weights: Mapping[str, Tensor]
    family: str
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return next(iter(self.weights.values())).device

    def plan(self, limit_bytes: int) -> tuple[BucketPlan, ...]:
        """Every tensor once, in the order of memory, in buckets of at most ``limit_bytes``."""
        plans: list[BucketPlan] = []
        members: list[str] = []
        tensors: list[TensorMeta] = []
        size = 0

        def close() -> None:
            nonlocal members, tensors, size
            if members:
                plans.append(BucketPlan(tuple(members), tuple(tensors), size))
            members, tensors, size = [], [], 0

        for name, weight in self.weights.items():
            metas = self._metas(name, weight)
            own = sum(map(num_bytes, metas))
            if size + own > limit_bytes or (tensors and tensors[0].dtype != metas[0].dtype):
                close()
            members.append(name)
            tensors.extend(metas)
            size += own
        close()
        return tuple(plans)

    @torch.no_grad()
    def pack(self, plan: BucketPlan, flat: Tensor) -> None:
        """Fill ``flat`` ([plan.num_bytes] uint8). Every rank calls it and gets the same bytes."""
        chosen = {name: self.weights[name] for name in plan.members}
        # What is put together for it is copied before the next one is, the rest all at once.
        in_parts = any(map(is_sharded, chosen.values()))
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        with gathered(chosen, self.family) as data:
            for (_, source), (_, target) in zip(data, unpacked(flat, plan.tensors), strict=True):
                if in_parts:
                    target.copy_(source)
                    continue
                targets.append(target)
                sources.append(source)
        if targets:
            torch._foreach_copy_(targets, sources)

    def digest(self) -> str:
        """What engines that hold these weights answer, by fingerprints. Every rank calls it."""
        with gathered(self.weights, self.family) as data:
            return weights_digest(fingerprints(self._cast(data)))

    def _cast(self, data: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in data:
            yield name, tensor.detach().to(self._target(tensor))

    def _metas(self, name: str, weight: Tensor) -> list[TensorMeta]:
        dtype = str(self._target(weight)).removeprefix("torch.")
        shapes = file_shapes({name: weight}, self.family)
        return [TensorMeta(each, dtype, tuple(shape.shape)) for each, shape in shapes.items()]

    def _target(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if tensor.is_floating_point() else tensor.dtype


def num_bytes(meta: TensorMeta) -> int:
    """Size of a tensor in a bucket."""
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return prod(meta.shape) * dtype.itemsize


def packed_digest(flat: Tensor, tensors: Sequence[TensorMeta]) -> str:
    """``WireWeights.digest`` of weights that lie in one bucket, from what was packed."""
    return weights_digest(fingerprints([*unpacked(flat, tensors)]))


def unpacked(flat: Tensor, tensors: Sequence[TensorMeta]) -> Iterator[tuple[str, Tensor]]:
    """Views of a bucket's tensors, by name."""
    for meta, part in zip(tensors, flat.split([*map(num_bytes, tensors)]), strict=True):
        dtype: torch.dtype = getattr(torch, meta.dtype)
        yield meta.name, part.view(dtype).view(meta.shape)
