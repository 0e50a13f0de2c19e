"""Checkpoint files of several ranks: each writes its rows, any number of ranks reads them.

    model.rank0of2.safetensors   parameters' rows of rank 0, and whatever is not sharded
    model.rank1of2.safetensors   parameters' rows of rank 1
    shards.json                  which rows of which parameter are in which file

``shards.json`` holds for every parameter its rows by rank, as ``[begin, end]``. Moments of the
optimizer are cut as their parameters are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from models.base import Carried
from models.errors import ContractViolation
from workers.trainers.ranks import Ranks
from workers.trainers.shards import cut, is_sharded, local_part, own_rows

SHARDS_FILE = "shards.json"


class ShardIndex(Carried):
    """``shards.json``."""

    schema_version: int = 1
    world: int
    rows: dict[str, tuple[tuple[int, int], ...]]
    """Of each sharded parameter: rows in the file of each rank."""

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], world: int) -> "ShardIndex":
        """How ``world`` ranks cut ``weights``."""
        return cls(
            world=world,
            rows={
                name: tuple(cut(tensor.shape[0], rank, world) for rank in range(world))
                for name, tensor in weights.items()
                if is_sharded(tensor)
            },
        )


def shard_name(file: str, rank: int, world: int) -> str:
    """Name of a rank's part of ``file`` (``model.safetensors``); ``file`` itself with one rank."""
    if world == 1:
        return file
    stem, _, suffix = file.partition(".")
    return f"{stem}.rank{rank}of{world}.{suffix}"


def own_tensors(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """What this rank writes: its rows, and on the first rank whatever is not sharded."""
    return {
        name: local_part(tensor)
        for name, tensor in tensors.items()
        if is_sharded(tensor) or ranks.rank == 0
    }


class ShardReader:
    """The parts of one file of a checkpoint, open for reading."""

    def __init__(self, paths: Sequence[Path], files: Sequence[Any], index: ShardIndex | None):
        self._paths = paths
        self._files = files
        self._index = index
        self._held = [set(file.keys()) for file in files]
        self.names = set[str]().union(*self._held)
        """Names of all tensors."""

    def refuse_other_names(self, expected: set[str]) -> None:
        """Raise ContractViolation when the files hold other tensors than ``expected``."""
        if self.names != expected:
            raise ContractViolation(
                f"{self._paths[0]} does not fit this model: missing "
                f"{sorted(expected - self.names)[:3]}, unexpected "
                f"{sorted(self.names - expected)[:3]}"
            )

    @torch.no_grad()
    def fill(self, target: Tensor, name: str, ranks: Ranks, parameter: str | None = None) -> None:
        """Copy tensor ``name`` into ``target``, or this rank's rows of it.

        Args:
            target: where to; sharded or not.
            name: in the files.
            ranks: who reads the other rows.
            parameter: the parameter that it is cut like; none: it is whole in the first file.

        Raises:
            ContractViolation: another shape, or rows that no file has.
        """
        begin, end = 0, target.shape[0] if target.dim() else 0
        if is_sharded(target):
            begin, end = own_rows(target, ranks.rank, ranks.world)
        cuts = None if self._index is None else self._index.rows.get(parameter or "")
        shape = self._shape(name, cuts)
        if shape != list(target.shape):
            raise ContractViolation(
                f"{self._paths[0]}: {name} has shape {tuple(shape)}, the model's is "
                f"{tuple(target.shape)}"
            )
        own = local_part(target)
        if not target.dim() or (cuts is None and not is_sharded(target)):
            own.copy_(self._files[0].get_tensor(name))
            return
        for file, (first, last) in zip(self._files, cuts or ((0, shape[0]),), strict=False):
            low, high = max(begin, first), min(end, last)
            if low < high:
                rows = file.get_slice(name)[low - first : high - first]
                own[low - begin : high - begin].copy_(rows)

    def _shape(self, name: str, cuts: Sequence[tuple[int, int]] | None) -> list[int]:
        """Shape of the whole tensor; checks that the files have the rows that the index says."""
        if cuts is None:
            return list(self._files[0].get_slice(name).get_shape())
        having = [
            file for file, names in zip(self._files, self._held, strict=True) if name in names
        ]
        parts = [list(file.get_slice(name).get_shape()) for file in having]
        held = [part[0] for part in parts]
        adjoining = [begin for begin, _ in cuts[1:]] == [end for _, end in cuts[:-1]]
        if held != [end - begin for begin, end in cuts] or cuts[0][0] != 0 or not adjoining:
            raise ContractViolation(
                f"{self._paths[0]}: the ranks' files hold {held} rows of {name}, "
                f"{SHARDS_FILE} says {[list(pair) for pair in cuts]}"
            )
        return [cuts[-1][1], *parts[0][1:]]


@contextmanager
def opened_shards(folder: Path, file: str, index: ShardIndex | None) -> Iterator[ShardReader]:
    """The parts of ``file`` in ``folder``; without ``index`` it is one file."""
    world = 1 if index is None else index.world
    paths = [folder / shard_name(file, rank, world) for rank in range(world)]
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        yield ShardReader(paths, files, index)
