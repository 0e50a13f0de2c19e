"""A hash of tensors that a GPU computes where they lie: fast, equal on every device, order counts.

A tensor's bytes, row-major and filled with zeros to a multiple of eight, are 64-bit words w_0, w_1,
... Word i of chunk c (``CHUNK_WORDS`` words) is mixed with a salt of its chunk and multiplied by an
odd key of its place, and the fingerprint is the sum of all of them modulo 2^64::

    m = w + salt(c);  m ^= m >> 32;  m *= key(i);  m ^= m >> 29;  fingerprint = sum of m

Salts and keys are outputs of SplitMix64, shifts keep the sign, and integers wrap, so the sum has
the same bits in whatever order it is taken. It finds errors, not forgers. Runs inside engines as
well, so it imports nothing but torch.
"""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

CHUNK_WORDS = 1 << 21
"""16 MiB: what one step reads, and what its temporaries take, twice."""
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Name -> 16 hex digits, of the elements as they are; tensors may be views of any layout.

    All tensors lie on one device, which is waited for once, at the end.
    """
    names: list[str] = []
    sums: list[Tensor] = []
    keys: Tensor | None = None
    for name, tensor in tensors:
        if keys is None:
            keys = _keys(tensor.device, CHUNK_WORDS)
        names.append(name)
        sums.append(_sum(tensor, keys))
    values = torch.stack(sums).tolist() if sums else []
    return {name: f"{value & _MASK:016x}" for name, value in zip(names, values, strict=True)}


def _sum(tensor: Tensor, keys: Tensor) -> Tensor:
    """The fingerprint, as an integer with a sign, on the tensor's device."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(_words(tensor).split(CHUNK_WORDS)):
        mixed = chunk + _signed(_splitmix(number))
        mixed ^= mixed >> 32
        mixed *= keys[: len(mixed)]
        mixed ^= mixed >> 29
        total += mixed.sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """[n] int64: the tensor's own memory where its layout allows."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 8:
        filled = data.new_zeros(-(-data.numel() // 8) * 8)
        filled[: data.numel()] = data
        data = filled
    if data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)


@lru_cache(maxsize=1)
def _keys(device: torch.device, size: int) -> Tensor:
    """[size] int64, odd: SplitMix64 of the places. Kept, because making them takes its time."""
    state = torch.arange(size, dtype=torch.int64, device=device)
    state = (state + 1) * _signed(_GOLDEN)
    state = (state ^ _unsigned_shift(state, 30)) * _signed(_FIRST)
    state = (state ^ _unsigned_shift(state, 27)) * _signed(_SECOND)
    return (state ^ _unsigned_shift(state, 31)) | 1


def _unsigned_shift(values: Tensor, bits: int) -> Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix(number: int) -> int:
    """SplitMix64 (Steele, Lea, Flood, 2014) of a counter."""
    state = (number + 1) * _GOLDEN & _MASK
    state = (state ^ (state >> 30)) * _FIRST & _MASK
    state = (state ^ (state >> 27)) * _SECOND & _MASK
    return state ^ (state >> 31)


def _signed(value: int) -> int:
    """The integer with the same 64 bits and a sign."""
    return value - (1 << 64) if value >> 63 else value
