"""Ranks that are processes of one host, and how they find each other.

Small values travel through CPU memory, gathered from all ranks and combined by each in the order of
ranks: the result has the same bits everywhere. They go over loopback only.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from models.errors import PerdureError, all_errors

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class ProcessRanks:
    """One rank of the default process group."""

    def __init__(self) -> None:
        """Join none: ``join_ranks`` did."""
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._agreed: PerdureError | None = None

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """See ``Ranks``."""
        return self._gather(values).sum(0, dtype=values.dtype).to(values.device)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """See ``Ranks``."""
        return self._gather(values).amax(0).to(values.device)

    def exchange(self, text: str) -> tuple[str, ...]:
        """See ``Ranks``."""
        data = torch.tensor(bytearray(text.encode()), dtype=torch.uint8)
        lengths = self._gather(torch.tensor(len(data))).tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = self._gather(padded) if max(lengths) else [padded] * self.world
        return tuple(
            row[:length].numpy().tobytes().decode()
            for row, length in zip(rows, lengths, strict=True)
        )

    def agree(self, error: PerdureError | None) -> None:
        """See ``Ranks``. What is raised has the class of the first rank's error."""
        own = "" if error is None else json.dumps([error.type_name(), error.message])
        texts = self.exchange(own)
        if any(texts):
            self._agreed = _joint(texts)
            raise self._agreed from error

    def has_agreed(self, error: PerdureError) -> bool:
        """See ``Ranks``."""
        return error is self._agreed

    def _gather(self, values: Tensor) -> Tensor:
        """[world, ...] in CPU memory."""
        own = values.detach().to("cpu").reshape(-1)
        found = torch.empty(self.world * own.numel(), dtype=own.dtype)
        dist.all_gather_into_tensor(found, own)  # a third less time than with a list of tensors
        return found.view(self.world, *values.shape)


def join_ranks(rendezvous: Path, rank: int, world: int, timeout_s: float) -> ProcessRanks:
    """Become rank ``rank`` of ``world``, on accelerator ``rank`` where there are some.

    Args:
        rendezvous: a file that does not exist yet, the same for all ranks and for nobody else.
        rank: 0-based.
        world: number of ranks.
        timeout_s: for every rank to come here, and for every collective from then on.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(rendezvous), world),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    return ProcessRanks()


def _joint(texts: tuple[str, ...]) -> PerdureError:
    """The error that all ranks raise; ``texts`` holds an empty text for a rank without one."""
    found = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
    classes = {error.type_name(): error for error in all_errors()}
    name = next(iter(found.values()))[0]
    listed = "; ".join(f"rank {rank}: {kind}: {text}" for rank, (kind, text) in found.items())
    return classes[name](listed)
