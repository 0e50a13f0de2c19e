"""``[trainer]``: how the optimizer process computes."""

from typing import Literal

from pydantic import Field

from configs.section import Section


class TrainerSection(Section):
    """``[trainer]``."""

    backend: Literal["local"] = "local"
    """Trainer back end: PyTorch, in one process or in several of one host."""
    num_processes: int = Field(default=1, ge=1)
    """Processes that share every optimizer step and the memory of weights, gradients and optimizer;
    must divide the samples of a step. With accelerators each process takes one."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """How long a process waits for the others, at the start and at any point of the work, before
    the trainer is given up and rebuilt."""
    attention: Literal["eager", "sdpa", "flash", "flash4"] = "sdpa"
    """Attention of the packed forward. eager is the fastest on CPU in bfloat16; sdpa takes torch's
    kernel for documents where it can, flash refuses to start where it cannot: it needs an NVIDIA
    GPU, bfloat16 and documents. flash4 needs a Hopper or Blackwell GPU and the package
    flash-attn-4 as well, and is the fastest there."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of forward and backward; master weights and optimizer states are float32."""
    num_threads: int | None = Field(default=None, ge=1)
    """Torch threads of each process; default: its share of all cores when sequential, else of half
    of them."""
    packing: Literal["shared_prompt", "documents"] | None = None
    """How samples are laid out: a prompt once with all its responses, or every sample by itself,
    one after the other; default: documents for a mixture of experts, which needs them, and in
    bfloat16 on a GPU, where a kernel knows their ends; else shared_prompt, which is less work."""
    micro_batch_tokens: int = Field(default=4096, ge=16)
    """Tokens of packed rows in one forward/backward."""
    logprob_chunk_tokens: int | None = Field(default=None, ge=16)
    """Response tokens whose logits exist at one time; default: 1024, on a GPU 8192."""
    activation_checkpointing: bool = False
    """Keep only what enters each decoder layer and compute the layer again in the backward pass:
    a third more work for a fraction of the memory."""
    compile: bool = False
    """Compile decoder layers and the log-softmax with torch.compile; needs a GPU, bfloat16,
    documents, another attention than eager, and a model without experts. The first update is
    slow."""
