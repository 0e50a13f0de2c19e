"""What ``config.json`` of an HF folder says about a decoder, for the supported families."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from models.errors import ConfigurationError

FAMILIES = ("llama", "mistral", "olmoe", "qwen2", "qwen3", "qwen3_moe")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeShape:
    """Rotary embedding: base, and the frequency rescaling of its type."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Mixture of experts: router and expert sizes."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: frozenset[int]
    """Layers that have experts; the others have a dense MLP."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and switches of one decoder."""

    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_positions: int
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: Literal["none", "head", "full"]
    clip_qkv: float | None
    rope: RopeShape
    moe: MoeShape | None
    eos_token_ids: tuple[int, ...]


def read_model_shape(folder: Path) -> ModelShape:
    """Read ``config.json`` (and ``generation_config.json`` for EOS ids).

    Raises ConfigurationError for a missing or broken file and for an unsupported family.
    """
    config = _read_json(folder / "config.json")
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigurationError(
            f"{folder / 'config.json'}: model_type {model_type!r} is not supported by the native"
            f" engine; supported: {', '.join(FAMILIES)}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigurationError(
            f"{folder / 'config.json'}: hidden_act {config['hidden_act']!r} is not supported: silu"
        )
    try:
        return _shape(folder, config, model_type)
    except KeyError as error:
        raise ConfigurationError(f"{folder / 'config.json'}: key {error} is missing") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigurationError(
            f"{folder / 'config.json'}: a key holds a value of the wrong kind: {error}"
        ) from error


def _shape(folder: Path, config: dict[str, Any], family: str) -> ModelShape:
    num_heads = int(config["num_attention_heads"])
    attention_bias = bool(config.get("attention_bias", False))
    max_positions = int(config["max_position_embeddings"])
    window = config.get("sliding_window")
    if window and (family == "mistral" or config.get("use_sliding_window")):
        # Inside the window sliding attention equals full attention.
        max_positions = min(max_positions, int(window))
    qk_norm: Literal["none", "head", "full"] = "none"
    if family in ("qwen3", "qwen3_moe"):
        qk_norm = "head"
    elif family == "olmoe":
        qk_norm = "full"
    return ModelShape(
        model_type=family,
        architectures=tuple(config.get("architectures") or ()),
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=max_positions,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=qk_norm,
        clip_qkv=config.get("clip_qkv"),
        rope=_rope(folder, config),
        moe=_moe(config, family),
        eos_token_ids=_eos_token_ids(folder, config),
    )


def _rope(folder: Path, config: dict[str, Any]) -> RopeShape:
    """Newer files have ``rope_parameters``, older ones ``rope_theta`` and ``rope_scaling``."""
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = told.get("rope_type") or told.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ConfigurationError(
            f"{folder / 'config.json'}: rope type {rope_type!r} is not supported;"
            f" supported: {', '.join(ROPE_TYPES)}"
        )
    theta = told.get("rope_theta") or config.get("rope_theta") or 10000.0
    original = told.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return RopeShape(
        theta=float(theta),
        rope_type=rope_type,
        factor=float(told.get("factor", 1.0)),
        low_freq_factor=float(told.get("low_freq_factor", 1.0)),
        high_freq_factor=float(told.get("high_freq_factor", 4.0)),
        original_max_positions=int(original),
    )


def _moe(config: dict[str, Any], family: str) -> MoeShape | None:
    if family not in ("qwen3_moe", "olmoe"):
        return None
    num_layers = int(config["num_hidden_layers"])
    num_experts = int(config.get("num_experts") or config["num_local_experts"])
    dense = set(config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step", 1) or 1)
    sparse = {i for i in range(num_layers) if i not in dense and (i + 1) % step == 0}
    size = config["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"]
    return MoeShape(
        num_experts=num_experts,
        top_k=int(config["num_experts_per_tok"]),
        intermediate_size=int(size),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        sparse_layers=frozenset(sparse),
    )


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """The union of both files' ids, as SGLang takes them."""
    found: set[int] = set()
    sources = [config]
    if (folder / "generation_config.json").is_file():
        sources.append(_read_json(folder / "generation_config.json"))
    for source in sources:
        told = source.get("eos_token_id")
        found.update([told] if isinstance(told, int) else told or ())
    return tuple(sorted(found))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path} does not exist: not an HF model folder") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} must hold a JSON object")
    return value


def inverse_frequencies(rope: RopeShape, head_dim: int) -> list[float]:
    """Inverse frequencies [head_dim / 2] of RoPE, rescaled as the rope type asks.

    Source: RoFormer (theta^(-2i/d)); Llama 3.1's wavelength-dependent interpolation.
    """
    base = [rope.theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    if rope.rope_type == "linear":
        return [frequency / rope.factor for frequency in base]
    if rope.rope_type == "llama3":
        return [_llama3(rope, frequency) for frequency in base]
    return base


def _llama3(rope: RopeShape, frequency: float) -> float:
    wavelength = 2.0 * math.pi / frequency
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    if wavelength < high:
        return frequency
    if wavelength > low:
        return frequency / rope.factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1.0 - smooth) * frequency / rope.factor + smooth * frequency
