"""What an SGLang server's live parameters are under the names of a model's files.

SGLang keeps some tensors of a layer as one: queries, keys and values; gate and up; all experts. The
parts are cut out again, so that the digest of what is served is comparable with the digest of what
a trainer exported. Runs inside a scheduler, so it imports nothing but torch and xxhash.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of tensors that SGLang pads to a multiple of rows."""


def live_checksums(model: Any, config: Mapping[str, Any]) -> dict[str, str]:
    """Name in the model's files -> xxh3_64 hex of the live bytes, row-major.

    ``config`` is the content of the model's ``config.json``: the server pads sizes in its own copy.
    A tied output head has no name of its own. Not for a model cut over several processes.
    """
    return {
        name: xxhash.xxh3_64_hexdigest(_bytes(tensor))
        for name, tensor in file_tensors(model.named_parameters(), config)
    }


def file_tensors(
    parameters: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """``parameters`` by the names of the files, as views without padding."""
    for name, parameter in parameters:
        tensor = parameter.detach()
        layer, _, last = name.rpartition(".qkv_proj.")
        if layer:
            for part, rows in zip("qkv", tensor.split(_head_rows(config)), strict=True):
                yield f"{layer}.{part}_proj.{last}", rows
            continue
        layer, _, last = name.rpartition(".gate_up_proj.")
        if layer:
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield f"{layer}.{part}_proj.{last}", rows
        elif name.endswith(".experts.w13_weight"):
            halves = tensor.chunk(2, 1)
            yield from _experts(name, "w13_weight", ("gate", "up"), halves, config)
        elif name.endswith(".experts.w2_weight"):
            yield from _experts(name, "w2_weight", ("down",), (tensor.transpose(1, 2),), config)
        elif name.endswith(VOCABULARY):
            yield name, tensor[: config["vocab_size"]]
        else:
            yield name, tensor


def _experts(
    name: str,
    ending: str,
    parts: tuple[str, ...],
    stacked: tuple[Tensor, ...],
    config: Mapping[str, Any],
) -> Iterator[tuple[str, Tensor]]:
    """Of each part [experts, inner width and padding, hidden size], expert by expert.

    ``w2_weight`` comes transposed, and each of its experts is turned back.
    """
    prefix = name.removesuffix(ending)
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    for part, experts in zip(parts, stacked, strict=True):
        for number, expert in enumerate(experts):
            rows = expert[:width]
            tensor = rows.T if part == "down" else rows
            yield f"{prefix}{number}.{part}_proj.weight", tensor


def _head_rows(config: Mapping[str, Any]) -> list[int]:
    """Rows of queries, keys and values."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or config["hidden_size"] // heads
    return [heads * size, kv_heads * size, kv_heads * size]


def _bytes(tensor: Tensor) -> Any:
    """The elements in row-major order; on a GPU, copied to the host for it."""
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
