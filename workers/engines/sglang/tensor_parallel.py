"""Checksums of a model that is cut over the processes of one server: of its tensors put together.

All processes run the check in step. In every round each of them is sent the parts of one tensor and
hashes the whole, so that work and memory are shared: one whole tensor a process. What every process
has whole it hashes itself, and keys and values that several processes hold are put together as
often as they are held, each time in another process. So the merged answers name every byte that
any process holds, and two copies that differ are two answers to one name.

Runs inside a scheduler, so it imports nothing but torch and its neighbor.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, distributed

from workers.engines.sglang.live_weights import (
    Extent,
    Tensors,
    extent,
    file_tensors,
    head_sizes,
    process_tensors,
    without_padding,
)

_FAILURES = (RuntimeError, LookupError, MemoryError)
"""What a device without memory or an unknown layout raises."""


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """The processes of one server, as one of them sees them."""

    rank: int
    size: int
    tensors: Any
    """Process group that moves tensors from where they lie."""
    objects: Any
    """Process group on the host."""

    def exchange(self, value: Any) -> list[Any]:
        """``value`` of every process, by rank."""
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.objects)
        return values


@dataclass(frozen=True, slots=True)
class _Part:
    """What this process holds of one tensor."""

    name: str
    tensor: Tensor
    extent: Extent | None
    """None for a tensor that every process has whole."""
    copies: int
    """Processes that hold the same part."""

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize

    @property
    def is_in_order(self) -> bool:
        """Whether the parts of all processes, one after the other, are the whole tensor."""
        return self.extent is not None and self.extent.dimension == 0 and self.copies == 1

    @property
    def layout(self) -> tuple[Any, ...]:
        """What must be the same in every process."""
        return self.name, tuple(self.tensor.shape), str(self.tensor.dtype), self.extent


def server_group() -> ServerGroup:
    """The tensor-parallel processes of the SGLang server that this one belongs to."""
    from sglang.srt.distributed import get_tp_group

    found = get_tp_group()
    return ServerGroup(found.rank_in_group, found.world_size, found.device_group, found.cpu_group)


def whole_checksums(
    parameters: Tensors,
    config: Mapping[str, Any],
    group: ServerGroup,
    checksums: Callable[[Tensors], dict[str, str]],
) -> dict[str, str]:
    """``checksums`` of the tensors that this process answers for, by the names of the files.

    Args:
        parameters: of the live model in this process.
        config: content of the model's ``config.json``.
        group: the processes of the server; each of them calls this.
        checksums: of whole tensors without padding, which it must not keep.

    Raises:
        RuntimeError: in every process, when one has failed or two hold different layouts.
    """
    if group.size == 1:
        return checksums([*file_tensors(parameters, config)])
    failure, parts, room = "", [], _Room.of([], group.size)
    try:
        parts = _parts(parameters, config, group.size)
        room = _Room.of(parts, group.size)
    except _FAILURES as error:
        failure = _shown(error)
    _agree(group, failure, [part.layout for part in parts])
    wholes = _wholes(parts, room, group)
    own: dict[str, str] = {}
    try:
        own = checksums(wholes)
    except _FAILURES as error:
        failure = _shown(error)
        for _ in wholes:  # The others still wait for the parts of this process.
            pass
    _agree(group, failure, [])
    return own


def _parts(parameters: Tensors, config: Mapping[str, Any], processes: int) -> list[_Part]:
    _, key_heads, _ = head_sizes(config)
    shared = max(1, processes // key_heads)
    parts = []
    for name, tensor in process_tensors(parameters, config, processes):
        found = extent(name, config)
        copies = shared if name.split(".")[-2:-1] in (["k_proj"], ["v_proj"]) else 1
        if copies == processes:
            found = None
        elif found is not None and tensor.shape[found.dimension] >= found.size:
            raise RuntimeError(
                f"{name}: a process has {list(tensor.shape)}, which is not a part of dimension "
                f"{found.dimension}, {found.size} in all"
            )
        parts.append(_Part(name, tensor, found, copies))
    return parts


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory for one tensor, reserved: a process that fails in mid-round would hang others."""

    received: Tensor
    """Bytes of the parts, one after the other."""
    joined: Tensor
    """Bytes of a tensor whose parts do not simply follow each other."""

    @classmethod
    def of(cls, parts: list[_Part], processes: int) -> "_Room":
        """Enough for each of ``parts``."""
        cut = [part for part in parts if part.extent is not None]
        device = cut[0].tensor.device if cut else None
        largest = max((part.num_bytes for part in cut), default=0)
        mixed = max((part.num_bytes for part in cut if not part.is_in_order), default=0)
        return cls(
            *(
                torch.empty(processes * size, dtype=torch.uint8, device=device)
                for size in (largest, mixed)
            )
        )

    def gather(self, part: _Part, owner: int, group: ServerGroup) -> Tensor | None:
        """[processes, *shape] in process ``owner``; None in the others."""
        sent = part.tensor.contiguous().reshape(-1).view(torch.uint8)
        received = None
        if owner == group.rank:
            received = self.received[: group.size * len(sent)].view(group.size, len(sent))
        distributed.gather(
            sent,
            None if received is None else list(received),
            group=group.tensors,
            group_dst=owner,
        )
        if received is None:
            return None
        return received.view(part.tensor.dtype).view(group.size, *part.tensor.shape)

    def join(self, part: _Part, parts: Tensor) -> Tensor:
        """``parts`` [parts, *shape], as they were gathered, as one tensor without padding."""
        assert part.extent is not None  # such a tensor is not gathered
        dimension = part.extent.dimension
        ordered = parts.movedim(0, dimension)
        if not part.is_in_order:
            room = self.joined[: ordered.numel() * ordered.itemsize].view(ordered.dtype)
            ordered = room.view(ordered.shape).copy_(ordered)
        return without_padding(ordered.flatten(dimension, dimension + 1), part.extent)


def _wholes(parts: list[_Part], room: _Room, group: ServerGroup) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors of this process; one that was put together is valid until the next one."""
    cut = []
    # Those of one round are of like sizes then.
    for part in sorted(parts, key=lambda part: -part.num_bytes):
        if part.extent is None:
            yield part.name, part.tensor
        else:
            cut += [(part, copy) for copy in range(part.copies)]
    for start in range(0, len(cut), group.size):
        own = None
        for owner, (part, copy) in enumerate(cut[start : start + group.size]):
            received = room.gather(part, owner, group)
            if received is not None:
                own = part.name, room.join(part, received[copy :: part.copies])
        if own is not None:
            yield own


def _agree(group: ServerGroup, failure: str, layouts: list[tuple[Any, ...]]) -> None:
    """Go on in every process, or in none."""
    told = group.exchange((failure, layouts))
    failed = [f"process {rank}: {text}" for rank, (text, _) in enumerate(told) if text]
    if failed:
        raise RuntimeError(f"no weight checksums: {'; '.join(failed)}")
    _, first = told[0]
    for rank, (_, other) in enumerate(told):
        for ours, theirs in zip_longest(first, other):
            if ours != theirs:
                raise RuntimeError(
                    f"no weight checksums: process 0 holds {ours}, process {rank} {theirs}"
                )


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
