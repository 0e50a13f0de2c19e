"""A hash of tensors that a GPU computes where they lie: fast, equal on every device, order counts.

A tensor's bytes, row-major and filled with zeros to a multiple of eight, are 64-bit words w_0, w_1,
... Word i of chunk c (``CHUNK_WORDS`` words) is mixed with a salt of its chunk and multiplied by an
odd key of its place, and the fingerprint is the sum of all of them modulo 2^64::

    m = w + salt(c);  m ^= m >> 32;  m *= key(i);  m ^= m >> 29;  fingerprint = sum of m

Salts and keys are outputs of SplitMix64, shifts keep the sign, and integers wrap, so the sum has
the same bits in whatever order it is taken. It finds errors, not forgers. Small tensors of one size
are rows of one matrix, because a GPU is told of a step of a tensor slower than it does it. Runs
inside engines as well, so it imports nothing but torch.
"""

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_WORDS = 1 << 21
"""16 MiB: what one step reads, and what its temporaries take, twice."""
_WAITING_WORDS = 4 * CHUNK_WORDS
"""What small tensors are together at most while they wait for others of their size."""
_MOST_ROWS = 1024
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Name -> 16 hex digits, of the elements as they are; tensors may be views of any layout.

    All tensors lie on one device, which is waited for once, at the end. Where they come one after
    the other, none of them is read after the next one was asked for; those of a collection stay.
    """
    names: list[str] = []
    sums: list[Tensor] = []
    waiting: dict[int, _Rows] = {}
    stay = isinstance(tensors, Collection)
    num_waiting = 0

    def conclude(rows: _Rows) -> None:
        names.extend(rows.names)
        sums.append(_mixed_sums(torch.stack(rows.words).add_(_salt(0))))

    for name, tensor in tensors:
        words = _words(tensor)
        size = len(words)
        if size > CHUNK_WORDS // 2:
            names.append(name)
            sums.append(_sum(words))
            continue
        if num_waiting + size > _WAITING_WORDS:
            for rows in waiting.values():
                conclude(rows)
            waiting.clear()
            num_waiting = 0
        rows = waiting.setdefault(size, _Rows([], []))
        rows.names.append(name)
        rows.words.append(words if stay else words.clone())
        num_waiting += size
        if len(rows.names) == _num_rows(size):
            conclude(waiting.pop(size))
            num_waiting -= size * len(rows.names)
    for rows in waiting.values():
        conclude(rows)
    values = torch.cat(sums).tolist() if sums else []
    return {name: f"{value & _MASK:016x}" for name, value in zip(names, values, strict=True)}


class _Rows(NamedTuple):
    """Tensors of one size, of one chunk at most, that are mixed as rows of one matrix."""

    names: list[str]
    words: list[Tensor]
    """[size] each."""


def _num_rows(size: int) -> int:
    """Rows of ``size`` words that one chunk has room for."""
    return min(_MOST_ROWS, CHUNK_WORDS // max(1, size))


def _sum(words: Tensor) -> Tensor:
    """[1]: the fingerprint of a tensor, as an integer with a sign, on its device."""
    chunks = enumerate(words.unsqueeze(0).split(CHUNK_WORDS, 1))
    return torch.stack([_mixed_sums(chunk + _salt(number)) for number, chunk in chunks]).sum(0)


def _mixed_sums(salted: Tensor) -> Tensor:
    """[rows]: sums of m over ``salted`` [rows, words], w + salt(c), which is overwritten."""
    salted ^= salted >> 32
    salted *= _keys(salted.device, CHUNK_WORDS)[: salted.shape[1]]
    salted ^= salted >> 29
    return salted.sum(1)


def _salt(number: int) -> int:
    return _signed(_splitmix(number))


def _words(tensor: Tensor) -> Tensor:
    """[n] int64: the tensor's own memory where its layout allows."""
    data = tensor.detach().contiguous().view(-1)
    if data.numel() * data.itemsize % 8 == 0 and data.storage_offset() * data.itemsize % 8 == 0:
        return data.view(torch.int64)
    data = data.view(torch.uint8)
    filled = data.new_zeros(-(-data.numel() // 8) * 8)
    filled[: data.numel()] = data
    return filled.view(torch.int64)


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
