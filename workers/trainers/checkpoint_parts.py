"""Tensors of a checkpoint: every rank writes its rows, any number of ranks reads them.

    model.rank0of2.safetensors   rows of rank 0, and whatever is not sharded
    model.rank1of2.safetensors   rows of rank 1

PyTorch's distributed checkpoint plans both ways: what a rank has to write, and which rows of which
files a rank needs. The files are those of its safetensors storage: a header says where in the whole
tensor each part begins, so its own reader reads them, and nothing in them runs. Its own writer has
a rank's file in memory before it writes it; here one tensor is.

Ranks exchange nothing: each saves and loads as if it were alone. What fails on one of them is
therefore an error of that rank, to be agreed upon like any other.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from models.checkpoint import CheckpointFile
from models.errors import ContractViolation
from workers.sources.tensor_file import write_tensors
from workers.trainers.ranks import Ranks
from workers.trainers.shards import is_sharded

_OFFSETS = "DCP_SHARDING_INFO"  # as the reader of PyTorch knows them, and the key below
_AT = "saved_offsets"
_VERSION = {"DCP_VERSION": "1.0"}
_ALONE = "torch.distributed is disabled"  # it warns of what is meant here


def part_name(file: str, rank: int, world: int) -> str:
    """Name of a rank's part of ``file`` (``model.safetensors``); ``file`` itself with one rank."""
    if world == 1:
        return file
    stem, _, suffix = file.partition(".")
    return f"{stem}.rank{rank}of{world}.{suffix}"


def write_parts(
    parts: Mapping[Path, Mapping[str, Tensor]], ranks: Ranks
) -> tuple[CheckpointFile, ...]:
    """Write this rank's part of every mapping of tensors to its path and flush it, all at once.

    That is its rows, and on the first rank whatever is not sharded.

    Returns:
        The files in their order, with the digests of what is on storage.

    Raises:
        OSError: a file cannot be written.
    """

    def write(path: Path, tensors: Mapping[str, Tensor]) -> CheckpointFile:
        own = {
            name: tensor
            for name, tensor in tensors.items()
            if is_sharded(tensor) or ranks.rank == 0
        }
        save(own, storage_writer=_PartWriter(path), planner=_PartPlanner(), no_dist=True)
        return describe(path)

    # Filters of warnings are the process's, so they are set around all threads.
    with _alone(), ThreadPoolExecutor(len(parts)) as threads:
        return tuple(threads.map(write, parts, parts.values()))


def describe(path: Path) -> CheckpointFile:
    """A file of a checkpoint with its size and digest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return CheckpointFile(path=path.name, sha256=digest, num_bytes=path.stat().st_size)


class PartReader:
    """The tensors that lie in the parts ``files`` of a folder."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        """Read the headers.

        Raises:
            ContractViolation: a file is damaged.
        """
        self._folder = folder
        for path in (folder / file for file in files):
            try:
                with safe_open(path, framework="pt"):
                    pass
            except SafetensorError as error:
                raise ContractViolation(f"{path} is damaged: {error}") from error
        self._reader = HuggingFaceStorageReader(str(folder))
        try:
            found = self._reader.read_metadata().state_dict_metadata
        except (LookupError, TypeError, ValueError) as error:
            raise ContractViolation(
                f"{folder}: headers of the safetensors files do not say where their rows belong "
                f"({error!r})"
            ) from error
        self._found = {
            name: tensor
            for name, tensor in found.items()
            if isinstance(tensor, TensorStorageMetadata)
        }

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._found)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copy every tensor into its target, of a sharded one this rank's rows.

        Raises:
            ContractViolation: the files hold other tensors than ``targets``, another shape or type
                of one, or not each of its rows once.
        """
        self._refuse_other_names(set(targets))
        for name, target in targets.items():
            self._refuse_unfit(name, target)
        with torch.no_grad(), _alone():
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            load(dict(targets), storage_reader=self._reader, planner=planner, no_dist=True)

    def _refuse_other_names(self, expected: set[str]) -> None:
        if self.names != expected:
            raise ContractViolation(
                f"{self._folder} does not fit this model: missing "
                f"{sorted(expected - self.names)[:3]}, unexpected "
                f"{sorted(self.names - expected)[:3]}"
            )

    def _refuse_unfit(self, name: str, target: Tensor) -> None:
        found = self._found[name]
        theirs = (tuple(found.size), found.properties.dtype)
        ours = (tuple(target.shape), target.dtype)
        if theirs != ours:
            raise ContractViolation(
                f"{self._folder}: {name} has shape {theirs[0]} of {theirs[1]}, the model's is "
                f"{ours[0]} of {ours[1]}"
            )
        if not _tile(found.chunks, ours[0]):
            spans = [[*zip(part.offsets, part.sizes, strict=True)] for part in found.chunks]
            raise ContractViolation(
                f"{self._folder}: the parts of {name} (offset and size by dimension: {spans}) do "
                f"not make up its shape {ours[0]}"
            )


def _tile(parts: Sequence[ChunkStorageMetadata], shape: tuple[int, ...]) -> bool:
    """Whether ``parts`` are the rows of a tensor of ``shape``, each row once."""
    if not shape:
        return len(parts) == 1
    spans = sorted((part.offsets[0], part.offsets[0] + part.sizes[0]) for part in parts)
    ends = [0, *(end for _, end in spans)]
    whole = all(tuple(part.sizes[1:]) == shape[1:] and not any(part.offsets[1:]) for part in parts)
    return whole and [begin for begin, _ in spans] == ends[:-1] and ends[-1] == shape[0]


class _PartPlanner(DefaultSavePlanner):
    """Plans what this rank writes. Whether all ranks' parts make a whole is found on reading."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans as they are."""
        return create_default_global_save_plan(all_plans)


class _PartWriter(StorageWriter):
    """Writes a plan's tensors to one file, one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Nothing to forget."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file."""
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            assert item.tensor_data is not None
            tensors[item.index.fqn] = data
            offsets[item.index.fqn] = {_AT: list(item.tensor_data.chunk.offsets)}
        write_tensors(self._path, tensors, metadata={_OFFSETS: json.dumps(offsets), **_VERSION})
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [
                WriteResult(item.index, tensors[item.index.fqn].nbytes, self._path.name)
                for item in plan.items
            ]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The headers say everything; the completion marker is another's."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """No other storage is to be chosen."""
        return True


@contextmanager
def _alone() -> Iterator[None]:
    """Save or load as the only process; what it fails for is raised as it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ALONE, UserWarning)
        try:
            yield
        except CheckpointException as failed:
            ((error, _),) = failed.failures.values()
            raise error from None
