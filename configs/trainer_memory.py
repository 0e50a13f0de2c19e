"""How many bytes a trainer will hold: weights and optimizer, what layers keep, logits of a chunk.

What a layer keeps for its backward pass, in bytes a token, was counted on transformers' Qwen3 layer
with attention that saves its inputs and output: hidden width H, query width Q (all heads), key
width K, feed-forward width I. Arithmetic in bfloat16 keeps the residual stream in float32.

    float32               24 H + 16 Q + 16 K + 16 I
    bfloat16              26 H + 10 Q + 10 K +  8 I
    bfloat16, on a GPU    12 H +  8 Q +  8 K +  8 I     norms are kernels
    bfloat16, compiled    10 H +  6 Q +  6 K +  6 I     norms are computed again
    checkpointing          4 H                          and one layer as above at a time

A layer of experts keeps I for each expert that a token goes through; what sorting tokens by expert
adds is left out, as are communication buffers and the CUDA context.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.run import RunSpec

if TYPE_CHECKING:
    from configs.memory import ModelShape

CHUNK_TOKENS = 1024
GPU_CHUNK_TOKENS = 8192
"""A chunk adds to the head's gradient once: fewer, larger ones move less memory."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_KEPT = {"float32": (24, 16, 16, 16), "bfloat16": (26, 10, 10, 8)}
_KEPT_ON_GPU = _KEPT | {"bfloat16": (12, 8, 8, 8)}
_KEPT_COMPILED = (10, 6, 6, 6)
_KEPT_BY_CHECKPOINTING = 4
"""Bytes of each element of the residual stream, which is float32."""
_SLICE_BYTES = 24 << 20
_GPU_SLICE_BYTES = 3 << 30
"""Most bytes of float32 temporaries of a log-softmax that is not compiled."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes at the peak of an optimizer step."""

    states: int
    """Of all processes: float32 weights, gradients and moments, a copy in the compute dtype."""
    activations: int
    """Of one process: what layers keep of a full micro-batch."""
    logits: int
    """Of one process: a chunk, its log-softmax, and what it adds to the head's gradient."""

    def of_process(self, num_processes: int) -> int:
        """What one of ``num_processes`` holds."""
        return -(-self.states // num_processes) + self.activations + self.logits


def trainer_memory(spec: RunSpec, shape: "ModelShape", *, on_gpu: bool) -> TrainerMemory:
    """What training a model of ``shape`` takes."""
    states, logits = trainer_bytes(spec, shape.num_parameters, shape.vocab_size, on_gpu=on_gpu)
    return TrainerMemory(states, activation_bytes(spec, shape, on_gpu=on_gpu), logits)


def activation_bytes(spec: RunSpec, shape: "ModelShape", *, on_gpu: bool) -> int:
    """What layers keep of ``trainer.micro_batch_tokens`` tokens; 0 for unknown widths."""
    trainer = spec.trainer
    eager = (_KEPT_ON_GPU if on_gpu else _KEPT)[trainer.compute_dtype]
    kept = _KEPT_COMPILED if trainer.compile else eager
    widths = (
        shape.hidden_size,
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
        shape.intermediate_size,
    )
    layer = sum(size * width for size, width in zip(kept, widths, strict=True))
    stays = (
        _KEPT_BY_CHECKPOINTING * shape.hidden_size if trainer.activation_checkpointing else layer
    )
    if not shape.hidden_size:
        return 0
    # the gradients of the layer that is differentiated take about as much as it kept
    return trainer.micro_batch_tokens * (shape.num_layers * stays + layer)


def trainer_bytes(
    spec: RunSpec, num_parameters: int, vocab_size: int, *, on_gpu: bool = False
) -> tuple[int, int]:
    """Bytes of the trainer's states, and of the logits of one chunk; activations come on top.

    States: 16 bytes a parameter (float32 weights, gradient and two Adam moments), 4 for the frozen
    reference of a KL term, and a copy in the compute dtype when that is another. A chunk: logits,
    which their gradient replaces, and float32 temporaries of some of its rows unless compiled.
    """
    compute = DTYPE_BYTES[spec.trainer.compute_dtype]
    states = (20 if spec.training.kl_loss_coef > 0 else 16) * num_parameters
    if spec.trainer.compute_dtype != "float32":
        states += compute * num_parameters
    elements = chunk_tokens(spec, on_gpu=on_gpu) * vocab_size
    most = _GPU_SLICE_BYTES if on_gpu else _SLICE_BYTES
    temporaries = 0 if spec.trainer.compile else min(12 * elements, most)
    return states, compute * elements + temporaries


def chunk_tokens(spec: RunSpec, *, on_gpu: bool) -> int:
    """``trainer.logprob_chunk_tokens`` or its default."""
    return spec.trainer.logprob_chunk_tokens or (GPU_CHUNK_TOKENS if on_gpu else CHUNK_TOKENS)
