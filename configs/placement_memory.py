"""Whether a run fits the memory of its GPUs: weights, keys and values, the trainer's states.

A lower bound, from shapes alone: communication buffers and the CUDA context come on top. An engine
must hold its share of the weights and one response of full length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.memory import ModelShape, model_shape
from configs.problem import Problem
from configs.run import RunSpec
from configs.trainer_memory import DTYPE_BYTES, trainer_memory

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on one GPU, at least."""

    trainer_states: int
    """Share of weights, gradient and optimizer; it stays while colocated engines sample."""
    trainer_work: int
    """Activations of a micro-batch and logits of a chunk, while it steps."""
    engine_weights: int
    engine_kv: int
    """Keys and values of one response of full length."""
    buckets: int
    """What a publication needs beside them; see ``_buckets``."""
    colocated: bool

    @property
    def training(self) -> int:
        """On a GPU of the trainer, while it steps."""
        return self.trainer_states + self.trainer_work

    @property
    def serving(self) -> int:
        """On a GPU of an engine, while it takes new weights."""
        resident = self.trainer_states if self.colocated else 0
        return resident + self.engine_weights + self.engine_kv + self.buckets

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "trainer_states_bytes": self.trainer_states,
            "trainer_work_bytes": self.trainer_work,
            "engine_weights_bytes": self.engine_weights,
            "engine_kv_bytes": self.engine_kv,
            "bucket_bytes": self.buckets,
            "training_bytes": self.training,
            "serving_bytes": self.serving,
        }


def gpu_memory(spec: RunSpec, shape: ModelShape) -> GpuMemory:
    """What one GPU of a run that takes GPUs must hold."""
    inference, parallel = spec.inference, spec.inference.tensor_parallel_size
    size = DTYPE_BYTES[inference.dtype]
    training = trainer_memory(spec, shape, on_gpu=True)
    # Heads are split over the GPUs of an engine; what is left over of them is held twice.
    heads = -(-shape.num_kv_heads // parallel)
    return GpuMemory(
        trainer_states=-(-training.states // spec.trainer.num_processes),
        trainer_work=training.activations + training.logits,
        engine_weights=-(-size * shape.num_parameters // parallel),
        engine_kv=2
        * shape.num_layers
        * heads
        * shape.head_dim
        * size
        * spec.core.max_context_length,
        buckets=_buckets(spec, size * shape.num_parameters),
        colocated=spec.colocated,
    )


def _buckets(spec: RunSpec, model_bytes: int) -> int:
    """Bytes of weights on their way, on an engine's GPU.

    A colocated engine reads the trainer's bucket; one that receives a broadcast puts empty tensors
    together to a bucket and so has two of them for a moment.
    """
    copies = {"disk": 0, "ipc": 1, "nccl": 2}[spec.publication_transport]
    return copies * min(spec.core.update_weight_buffer_mib << 20, model_bytes)


def memory_problems(spec: RunSpec) -> Iterator[Problem]:
    """Why the run cannot fit ``placement.gpu_memory_gib``.

    Nothing where that, or the shape of the model, is unknown.
    """
    given = spec.placement.gpu_memory_gib
    shape = None if given is None else model_shape(spec)
    if given is None or shape is None:
        return
    need = gpu_memory(spec, shape)
    if need.training > given * _GIB:
        yield Problem(
            "placement.gpu_memory_gib",
            f"the trainer does not fit: states {_gib(need.trainer_states)} (all of "
            f"{spec.trainer.num_processes} processes / {spec.trainer.num_processes}) + activations "
            f"and logits {_gib(need.trainer_work)} = {_gib(need.training)} GiB a GPU",
            given,
            "raise trainer.num_processes, set trainer.activation_checkpointing, or lower "
            "trainer.micro_batch_tokens or trainer.logprob_chunk_tokens",
        )
    if need.serving > given * _GIB:
        resident = f"trainer states {_gib(need.trainer_states)} + " if need.colocated else ""
        yield Problem(
            "placement.gpu_memory_gib",
            f"an engine does not fit: {resident}weights {_gib(need.engine_weights)} + one "
            f"response of core.max_context_length tokens {_gib(need.engine_kv)} + weights on "
            f"their way {_gib(need.buckets)} = {_gib(need.serving)} GiB a GPU",
            given,
            "raise inference.tensor_parallel_size, or lower core.max_context_length or "
            "core.update_weight_buffer_mib",
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f}"
