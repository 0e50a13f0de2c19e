"""A model's tensors as the tensor-parallel processes of an SGLang server hold them.

Written from the layers of SGLang: what column-parallel layers cut by rows, row-parallel ones by
columns, which heads a process gets, where zeros fill up. Plain loops over whole tensors.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

FILLER = 9.0
"""In padding, so that it shows where it is hashed."""


def cut_parameters(
    files: dict[str, Tensor], config: dict[str, Any], rank: int, size: int, padding: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """What process ``rank`` of ``size`` has of ``files``, by SGLang's names.

    ``padding``: rows of an inner width come in multiples of it in every process.
    """
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    for name, tensor in files.items():
        layer, _, last = name.rpartition(".q_proj.")
        if layer:
            of_keys = rank // (size // keys) if keys < size else rank
            own_keys = max(1, keys // size) * head
            yield (
                f"{layer}.qkv_proj.{last}",
                torch.cat(
                    [
                        _slice(tensor, rank, heads // size * head),
                        _slice(files[f"{layer}.k_proj.{last}"], of_keys, own_keys),
                        _slice(files[f"{layer}.v_proj.{last}"], of_keys, own_keys),
                    ]
                ),
            )
        elif name.endswith((".k_proj.weight", ".v_proj.weight", ".k_proj.bias", ".v_proj.bias")):
            continue
        elif ".experts." in name:
            if name.endswith(".experts.0.gate_proj.weight"):
                yield from _experts(name, files, config, (rank, size), padding)
        elif name.endswith(".gate_proj.weight"):
            up = files[name.replace("gate_proj", "up_proj")]
            halves = [_part(half, rank, size, padding) for half in (tensor, up)]
            yield name.replace("gate_proj", "gate_up_proj"), torch.cat(halves)
        elif name.endswith(".up_proj.weight"):
            continue
        elif name.endswith(".o_proj.weight"):
            yield name, _part(tensor.T, rank, size, 1).T.contiguous()
        elif name.endswith(".down_proj.weight"):
            yield name, _part(tensor.T, rank, size, padding).T.contiguous()
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            yield name, _part(tensor, rank, size, 64 // size)
        else:
            yield name, tensor.clone()


def _experts(
    name: str,
    files: dict[str, Tensor],
    config: dict[str, Any],
    place: tuple[int, int],
    padding: int,
) -> Iterator[tuple[str, Tensor]]:
    prefix = name.removesuffix("0.gate_proj.weight")
    joined, down = [], []
    for expert in range(config["num_experts"]):
        names = [f"{prefix}{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
        gate, up, last = (files[each] for each in names)
        joined.append(torch.cat([_part(half, *place, padding) for half in (gate, up)]))
        down.append(_part(last.T, *place, padding).T)
    yield f"{prefix}w13_weight", torch.stack(joined)
    yield f"{prefix}w2_weight", torch.stack(down).contiguous()


def _slice(tensor: Tensor, number: int, rows: int) -> Tensor:
    return tensor[number * rows : (number + 1) * rows]


def _part(tensor: Tensor, rank: int, size: int, multiple: int) -> Tensor:
    """Rows of one process, after padding at the end to equal parts of a multiple."""
    step = multiple * size
    rows = -(-len(tensor) // step) * step
    filled = torch.full((rows, *tensor.shape[1:]), FILLER, dtype=tensor.dtype)
    filled[: len(tensor)] = tensor
    return _slice(filled, rank, rows // size).clone()
