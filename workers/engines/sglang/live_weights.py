"""What an SGLang server's live parameters are under the names of a model's files.

SGLang keeps some tensors of a layer as one: queries, keys and values; gate and up; all experts. The
parts are cut out again, so that the digest of what is served is comparable with the digest of what
a trainer exported. Runs inside a scheduler, so it imports nothing but torch and xxhash.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

Tensors = Iterable[tuple[str, Tensor]]
"""Name and tensor, one after the other."""

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of tensors that SGLang pads to a multiple of rows."""
_ATTENTION = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
"""Projection -> dimension of its weight that has the heads."""
_FEED_FORWARD = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}
"""Projection -> dimension of its weight that has the inner width."""


class Extent(NamedTuple):
    """The dimension of a tensor that SGLang pads, and cuts over tensor-parallel processes."""

    dimension: int
    size: int
    """Of the whole tensor in the model's files."""


def xxh3_checksums(tensors: Tensors) -> dict[str, str]:
    """Name -> xxh3_64 hex of the bytes, row-major."""
    return {name: xxhash.xxh3_64_hexdigest(_bytes(tensor)) for name, tensor in tensors}


def parameters_of(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """``model.named_parameters()``; the walk to their modules, most of its time, is made once."""
    seen: set[Tensor] = set()
    for prefix, module in _modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                yield f"{prefix}.{name}" if prefix else name, parameter


@lru_cache(maxsize=1)
def _modules(model: torch.nn.Module) -> tuple[tuple[str, torch.nn.Module], ...]:
    return tuple(model.named_modules())


def file_tensors(parameters: Tensors, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """``parameters`` of a model in one process by the names of the files, as views without padding.

    ``config`` is the content of the model's ``config.json``: the server pads sizes in its own copy.
    A tied output head has no name of its own.
    """
    for name, tensor in process_tensors(parameters, config, 1):
        yield name, without_padding(tensor, extent(name, config))


def process_tensors(
    parameters: Tensors, config: Mapping[str, Any], processes: int
) -> Iterator[tuple[str, Tensor]]:
    """What one of ``processes`` tensor-parallel processes holds, by the names of the files.

    Views with their padding.

    Raises:
        RuntimeError: heads or experts are laid out otherwise.
    """
    for name, parameter in parameters:
        tensor = parameter.detach()
        layer, _, last = name.rpartition(".qkv_proj.")
        if layer:
            rows = _head_rows(name, tensor, config, processes)
            for part, cut in zip("qkv", tensor.split(rows), strict=True):
                yield f"{layer}.{part}_proj.{last}", cut
            continue
        layer, _, last = name.rpartition(".gate_up_proj.")
        if layer:
            for part, cut in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield f"{layer}.{part}_proj.{last}", cut
        elif name.endswith(".experts.w13_weight"):
            halves = tensor.chunk(2, 1)
            yield from _experts(name, "w13_weight", ("gate", "up"), halves, config)
        elif name.endswith(".experts.w2_weight"):
            yield from _experts(name, "w2_weight", ("down",), (tensor,), config)
        else:
            yield name, tensor


def extent(name: str, config: Mapping[str, Any]) -> Extent | None:
    """Where the tensor ``name`` of the files is cut; None for one that every process has whole."""
    if name.endswith(VOCABULARY):
        return Extent(0, config["vocab_size"])
    *_, module, kind = ("", *name.split("."))
    dimension = (_ATTENTION | _FEED_FORWARD).get(module)
    if dimension is None or (kind == "bias" and dimension == 1):
        return None
    if module in _FEED_FORWARD:
        experts = config.get("moe_intermediate_size") if ".experts." in name else None
        return Extent(dimension, experts or config["intermediate_size"])
    heads, key_heads, head_dim = head_sizes(config)
    return Extent(dimension, head_dim * (key_heads if module in ("k_proj", "v_proj") else heads))


def without_padding(tensor: Tensor, found: Extent | None) -> Tensor:
    """The whole ``tensor`` as the files have it, a view."""
    if found is None or tensor.shape[found.dimension] <= found.size:
        return tensor
    return tensor.narrow(found.dimension, 0, found.size)


def head_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Heads of queries, heads of keys and values, elements of one."""
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads") or heads
    return heads, key_heads, config.get("head_dim") or config["hidden_size"] // heads


def _experts(
    name: str,
    ending: str,
    parts: tuple[str, ...],
    stacked: tuple[Tensor, ...],
    config: Mapping[str, Any],
) -> Iterator[tuple[str, Tensor]]:
    """Of each part [experts, rows, columns], expert by expert."""
    prefix = name.removesuffix(ending)
    expected = config.get("num_experts") or config.get("num_local_experts")
    for part, experts in zip(parts, stacked, strict=True):
        if len(experts) != expected:
            raise RuntimeError(
                f"{name} has {len(experts)} of {expected} experts: experts that are spread over "
                "processes cannot be confirmed"
            )
        for number, expert in enumerate(experts):
            yield f"{prefix}{number}.{part}_proj.weight", expert


def _head_rows(
    name: str, tensor: Tensor, config: Mapping[str, Any], processes: int
) -> tuple[int, int, int]:
    """Rows of queries, keys and values in one process; every process has a head of each."""
    heads, key_heads, head_dim = head_sizes(config)
    keys = max(1, key_heads // processes) * head_dim
    rows = (heads // processes * head_dim, keys, keys)
    if sum(rows) != len(tensor):
        raise RuntimeError(
            f"{name} has {len(tensor)} rows, but {heads} heads and {key_heads} of keys and values "
            f"over {processes} processes are {' + '.join(map(str, rows))} = {sum(rows)}"
        )
    return rows


def _bytes(tensor: Tensor) -> Any:
    """The elements in row-major order; on a GPU, copied to the host for it."""
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
