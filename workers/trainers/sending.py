"""The trainer's side of a publication without files: buckets that engines open or receive."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.run import RunSpec
from models.errors import ContractViolation
from models.publication import CPU, Transport, WeightBucket, WeightsRef
from workers.trainers.buckets import BucketPlan, WireWeights, packed_digest
from workers.trainers.handles import SharedMemory
from workers.trainers.ranks import Ranks
from workers.trainers.weights import named_weights, own_exports


class WeightSender:
    """Buckets of one version at a time. Every rank calls every method, in the same order."""

    def __init__(
        self,
        model: Any,
        ranks: Ranks,
        dtype: torch.dtype,
        bucket_bytes: int,
        transport: Transport,
        file: Callable[[int], Path],
    ) -> None:
        """Send ``model``, of which this rank may hold parts.

        Args:
            model: a transformers causal LM.
            ranks: who trains as well.
            dtype: type of floating tensors at the engines.
            bucket_bytes: most bytes of a bucket.
            transport: ``ipc`` makes handles of every bucket.
            file: bytes -> a file in shared memory for a bucket, on a machine without GPUs.
        """
        self._file = file
        self._model = model
        self._ranks = ranks
        self._dtype = dtype
        self._transport = transport
        self._device = next(model.parameters()).device
        self._plans: tuple[BucketPlan, ...] = self._weights.plan(bucket_bytes)
        self._packed: tuple[WeightBucket, SharedMemory] | None = None

    @classmethod
    def of(cls, spec: RunSpec, model: Any, ranks: Ranks) -> "WeightSender | None":
        """The sender of a run; None where engines load files."""
        transport = spec.publication_transport
        if transport == "disk":
            return None

        def file(size: int) -> Path:
            return own_exports(spec.output.root, size) / f"bucket-{ranks.rank}"

        dtype = getattr(torch, spec.inference.dtype)
        bucket_bytes = spec.core.update_weight_buffer_mib << 20
        return cls(model, ranks, dtype, bucket_bytes, transport, file)

    def offer(self, version: int) -> WeightsRef:
        """Describe the current weights, which are those of ``version``.

        Those that fill one bucket are packed for it: they are cast once, for both.
        """
        self.drop()
        if len(self._plans) > 1:
            return self._described(version, "", self._weights.digest())
        bucket = self.pack(version, 0)
        digest = packed_digest(self.flat(version, 0), bucket.tensors)
        return self._described(version, "", digest)

    def describe(self, version: int, path: str | Path) -> WeightsRef:
        """The current weights, by the checksums that engines compute where the tensors lie."""
        return self._described(version, str(path), self._weights.digest())

    def _described(self, version: int, path: str, digest: str) -> WeightsRef:
        return WeightsRef(
            version=version,
            path=path,
            digest=digest,
            checksum="fingerprint",
            transport="disk" if path else self._transport,
            num_buckets=0 if path else len(self._plans),
            num_tensors=sum(len(plan.tensors) for plan in self._plans),
            num_bytes=sum(plan.num_bytes for plan in self._plans),
            dtype=str(self._dtype).removeprefix("torch."),
        )

    def pack(self, version: int, index: int) -> WeightBucket:
        """Fill bucket ``index``; the one before is given up. The same index again packs nothing.

        Raises:
            ContractViolation: there is no such bucket.
        """
        if self._packed is not None and self._held(version, index):
            return self._packed[0]
        if not 0 <= index < len(self._plans):
            raise ContractViolation(f"bucket {index} asked for, there are {len(self._plans)}")
        plan = self._plans[index]
        self.drop()
        memory = SharedMemory(plan.num_bytes, self._device, self._file)
        self._weights.pack(plan, memory.data)
        handles: dict[str, str] = {}
        if self._transport == "ipc":
            handles = self._exchanged({own_device(self._ranks): memory.handle(plan.tensors)})
        bucket = WeightBucket(
            version=version,
            index=index,
            tensors=plan.tensors,
            num_bytes=plan.num_bytes,
            handles=handles,
        )
        self._packed = (bucket, memory)
        return bucket

    def flat(self, version: int, index: int) -> Tensor:
        """[bytes] of bucket ``index`` on this rank's device.

        Raises:
            ContractViolation: another one, or none, is packed.
        """
        if self._packed is None or not self._held(version, index):
            raise ContractViolation(f"bucket {index} of version {version} is not packed")
        return self._packed[1].data

    def drop(self) -> None:
        """Give up the packed bucket's memory."""
        if self._packed is not None:
            self._packed[1].close()
            self._packed = None

    @property
    def _weights(self) -> WireWeights:
        return WireWeights(named_weights(self._model), self._model.config.model_type, self._dtype)

    def _held(self, version: int, index: int) -> bool:
        assert self._packed is not None
        return (self._packed[0].version, self._packed[0].index) == (version, index)

    def _exchanged(self, own: dict[str, str]) -> dict[str, str]:
        """The handles of all ranks."""
        every: dict[str, str] = {}
        for text in self._ranks.exchange(json.dumps(own)):
            every |= json.loads(text)
        return every


def own_device(ranks: Ranks) -> str:
    """This rank's GPU as CUDA counts them on the host; ``cpu`` without one."""
    if not torch.cuda.is_available():
        return CPU
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[ranks.rank] if visible else str(ranks.rank)
