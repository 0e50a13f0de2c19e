"""Whether SGLang can serve a model at all, and cut it over ``inference.tensor_parallel_size`` GPUs.

The rules are those that its layers assert while a server starts, minutes later and without a key.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from configs.memory import known_folder
from configs.model import TinySpec
from configs.problem import Problem
from configs.run import RunSpec

_VOCABULARY_MULTIPLE = 64
"""SGLang pads the rows of embedding and head to a multiple of it."""


def cut_problems(spec: RunSpec) -> Iterator[Problem]:
    """Why SGLang cannot cut the run's model, where its sizes are known."""
    config = known_sizes(spec)
    if config is not None:
        yield from problems_of_cut(config, spec.inference.tensor_parallel_size)


def problems_of_cut(config: Mapping[str, Any], parallel: int) -> Iterator[Problem]:
    """Why SGLang cannot cut the model of a ``config.json``; nothing where that says too little."""
    reasons = cut_reasons(config, parallel) if _says_enough(config) else []
    if reasons:
        fit = [n for n in range(1, _heads(config)[0] + 1) if not cut_reasons(config, n)]
        yield Problem(
            "inference.tensor_parallel_size",
            f"SGLang cannot cut the model over {parallel} GPUs: {'; '.join(reasons)}",
            parallel,
            f"use {'one of ' if len(fit) > 1 else ''}{', '.join(map(str, fit))}",
        )


def serving_problems(spec: RunSpec) -> Iterator[Problem]:
    """Why SGLang cannot serve the run's model on any number of GPUs, where that is known."""
    config = known_sizes(spec)
    heads, key_heads = _heads(config or {})
    if config is not None and config.get("model_type") == "olmoe" and heads != key_heads:
        tiny = spec.model.source == "tiny"
        yield Problem(
            "model.tiny.num_kv_heads" if tiny else "model.source",
            "SGLang serves OLMoE only with as many key-value heads as heads: "
            f"{key_heads} of {heads}",
            key_heads if tiny else spec.model.source,
            f"use {heads} key-value heads, or another engine",
        )


def known_sizes(spec: RunSpec) -> Mapping[str, Any] | None:
    """Sizes under their names in ``config.json``: of a tiny model, or of a folder on this machine.

    None for another model, and for a folder whose file cannot be read or says too little.
    """
    if spec.model.source == "tiny":
        return _tiny_sizes(spec.model.tiny or TinySpec())
    folder = known_folder(spec)
    try:
        config = {} if folder is None else json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return config if _says_enough(config) else None


def cut_reasons(config: Mapping[str, Any], parallel: int) -> list[str]:
    """What does not come out even, with the numbers; ``config`` is that of ``known_sizes``."""
    if parallel == 1:
        return []
    if config.get("model_type") == "olmoe":
        return ["it normalizes queries and keys of OLMoE over all heads in every process"]
    heads, key_heads = _heads(config)
    rows = -(-config["vocab_size"] // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    sizes = {"heads": heads, **_widths(config), "rows of vocabulary, padded": rows}
    reasons = [
        f"{size} {what} % {parallel} = {size % parallel}"
        for what, size in sizes.items()
        if size % parallel
    ]
    if key_heads >= parallel and key_heads % parallel:
        reasons.append(f"{key_heads} key-value heads % {parallel} = {key_heads % parallel}")
    elif key_heads < parallel and parallel % key_heads:
        reasons.append(f"{parallel} % {key_heads} key-value heads = {parallel % key_heads}")
    experts = config.get("num_experts") or parallel
    if experts < parallel:
        reasons.append(f"{experts} experts < {parallel}")
    return reasons


def _heads(config: Mapping[str, Any]) -> tuple[int, int]:
    heads = config.get("num_attention_heads", 0)
    return heads, config.get("num_key_value_heads") or heads


def _widths(config: Mapping[str, Any]) -> dict[str, int]:
    """Inner widths of the feed-forward layers that the model has."""
    dense, width = config["intermediate_size"], config.get("moe_intermediate_size")
    if not config.get("num_experts") or not width:
        return {"inner width": dense}
    mixed = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) > 1
    return {"inner width of an expert": width} | ({"inner width": dense} if mixed else {})


def _says_enough(config: Any) -> bool:
    needed = ("num_attention_heads", "intermediate_size", "vocab_size")
    return isinstance(config, dict) and all(isinstance(config.get(key), int) for key in needed)


def _tiny_sizes(tiny: TinySpec) -> dict[str, Any]:
    experts = tiny.experts
    return {
        "model_type": tiny.architecture,
        "vocab_size": tiny.vocab_size,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "intermediate_size": tiny.inner_size,
        "num_experts": None if experts is None else experts.num_experts,
        "moe_intermediate_size": None if experts is None else experts.moe_intermediate_size,
    }
