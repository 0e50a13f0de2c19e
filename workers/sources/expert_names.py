"""Names of experts: fused tensors in memory, one matrix an expert in files and on the wire.

transformers keeps the experts of a layer in two tensors, ``experts.gate_up_proj`` [E, 2I, H] and
``experts.down_proj`` [E, H, I]: E experts, H hidden, I inner width, the gate's rows before the up
projection's. Files name ``experts.0.gate_proj.weight`` [I, H], ``experts.0.up_proj.weight`` [I, H],
``experts.0.down_proj.weight`` [H, I], and so on. Both hold the same numbers; parts are views.
"""

from collections.abc import Mapping

from torch import Tensor

FUSED_FAMILIES = ("olmoe", "qwen3_moe")
"""Model types whose experts are laid out in this way."""
_GATE_UP = ".mlp.experts.gate_up_proj"
_DOWN = ".mlp.experts.down_proj"


def file_weights(weights: Mapping[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """``weights`` by the names that files use, in their order; fused experts become views.

    Args:
        weights: Tensors by their names in memory.
        model_type: The family, as ``config.json`` has it; another than ``FUSED_FAMILIES`` has
            nothing to split.
    """
    if model_type not in FUSED_FAMILIES:
        return dict(weights)
    named: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        named.update(_parts(name, tensor))
    return named


def _parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.endswith(_GATE_UP):
        prefix, inner = name.removesuffix("gate_up_proj"), tensor.shape[1] // 2
        parts = {}
        for expert, both in enumerate(tensor):
            parts[f"{prefix}{expert}.gate_proj.weight"] = both[:inner]
            parts[f"{prefix}{expert}.up_proj.weight"] = both[inner:]
        return parts
    if name.endswith(_DOWN):
        prefix = name.removesuffix("down_proj")
        return {f"{prefix}{expert}.down_proj.weight": part for expert, part in enumerate(tensor)}
    return {name: tensor}
