"""Choosing the next token of every running request at once.

n requests, V vocabulary. Log-probs are those of SGLang: log softmax(logits / temperature) over the
full vocabulary, before top-p, top-k and min-p.
"""

from dataclasses import dataclass

import numpy as np
import torch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
SHORT_LIST = 1024
"""Restricted rows first look at this many best tokens; a full sort is the rare fallback."""


@dataclass(slots=True)
class SamplingRows:
    """Parameters of n requests as columns [n]; views of the scheduler's own state."""

    temperature: torch.Tensor  # float32; 0: greedy
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32
    top_k: torch.Tensor  # int64; -1: off
    seed: torch.Tensor  # int64
    step: torch.Tensor  # int64, tokens generated so far


def uniforms(seed: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """One float64 in [0, 1) per row, a pure function of (seed, step).

    Source: SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator, seed mixed first.
    """
    state = _mix(seed.numpy().view(np.uint64) + GOLDEN)
    counter = step.numpy().view(np.uint64) + np.uint64(1)
    bits = _mix(state + counter * GOLDEN) >> np.uint64(11)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)


def _mix(
    z: "np.ndarray[tuple[int], np.dtype[np.uint64]]",
) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    z = (z ^ (z >> np.uint64(30))) * MIX_1
    z = (z ^ (z >> np.uint64(27))) * MIX_2
    return z ^ (z >> np.uint64(31))


def sample(
    logits: torch.Tensor, rows: SamplingRows, plain: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens [n] int64 and their log-probs [n] float32 for float32 ``logits`` [n, V].

    ``plain`` promises that no row is greedy or restricted. ``logits`` may be overwritten.
    """
    greedy = rows.temperature == 0
    # Greedy log-probs are those of temperature 1.
    heat = torch.where(greedy, 1.0, rows.temperature).unsqueeze(1)
    if bool((heat != 1).any()):
        logits.div_(heat)
    probabilities = logits.softmax(-1)
    draws = uniforms(rows.seed, rows.step)
    chosen = _invert(probabilities, draws) if plain else _choose(probabilities, draws, rows, greedy)
    picked = probabilities.gather(1, chosen.unsqueeze(1)).squeeze(1)
    return chosen, picked.log()


def _choose(
    probabilities: torch.Tensor, draws: torch.Tensor, rows: SamplingRows, greedy: torch.Tensor
) -> torch.Tensor:
    """Rows may be greedy, free or restricted; each kind is handled as one block."""
    limited = (rows.top_p < 1) | (rows.top_k > 0) | (rows.min_p > 0)
    chosen = torch.empty(len(probabilities), dtype=torch.int64)
    for kind, block in (
        ("greedy", greedy),
        ("free", ~greedy & ~limited),
        ("limited", ~greedy & limited),
    ):
        index = block.nonzero().squeeze(1)
        if not len(index):
            continue
        part = probabilities[index]
        if kind == "greedy":
            chosen[index] = part.argmax(-1)
        elif kind == "free":
            chosen[index] = _invert(part, draws[index])
        else:
            limits = (rows.top_p[index], rows.top_k[index], rows.min_p[index])
            chosen[index] = _restricted(part, draws[index], *limits)
    return chosen


def _invert(probabilities: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sampling: the first index whose cumulative mass exceeds draw x total.

    In two levels, block sums and then one block, which spares the running sum over V.
    """
    n, vocabulary = probabilities.shape
    width = next((w for w in range(512, 31, -1) if vocabulary % w == 0), vocabulary)
    blocks = probabilities.view(n, -1, width)
    sums = blocks.sum(-1)
    ends = sums.cumsum(-1)
    target = (draws.unsqueeze(1) * ends[:, -1:]).float()
    block = _first_above(ends, target)
    inside = blocks[torch.arange(n), block.squeeze(1)].cumsum(-1)
    offset = _first_above(inside, target - (ends - sums).gather(1, block))
    return (block * width + offset).squeeze(1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index [n, 1] with cumulative > target; rounding never leads past the last mass."""
    inside = torch.minimum(target, cumulative[:, -1:] * (1 - 2.0**-23)).clamp_(min=0.0)
    found = torch.searchsorted(cumulative, inside, right=True)
    # NaN logits (broken weights) are found nowhere: the answer then carries a NaN log-prob,
    # which clients refuse, instead of an engine that dies.
    return found.clamp_(max=cumulative.shape[1] - 1)


def _restricted(
    probabilities: torch.Tensor,
    draws: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Top-k, top-p and min-p applied jointly to the descending order, then inverse CDF."""
    vocabulary = probabilities.shape[1]
    best, index = probabilities.topk(min(SHORT_LIST, vocabulary), dim=-1)
    enough = (best.sum(-1) > top_p) | ((top_k > 0) & (top_k <= best.shape[1]))
    enough |= best[:, -1] < min_p * best[:, 0]
    chosen = torch.empty(len(probabilities), dtype=torch.int64)
    for wide, block in ((False, enough), (True, ~enough)):
        rows = block.nonzero().squeeze(1)
        if not len(rows):
            continue
        ranked, ids = best[rows], index[rows]
        if wide and vocabulary > SHORT_LIST:
            ranked, ids = probabilities[rows].sort(-1, descending=True)
        kept = _keep(ranked, top_p[rows], top_k[rows], min_p[rows])
        place = _invert(kept, draws[rows]).unsqueeze(1)
        chosen[rows] = ids.gather(1, place).squeeze(1)
    return chosen


def _keep(
    ranked: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Zero what the limits cut from ``ranked`` [m, R], which is descending."""
    before = ranked.cumsum(-1) - ranked
    cut = before > top_p.unsqueeze(1)
    rank = torch.arange(ranked.shape[1])
    cut |= (top_k.unsqueeze(1) > 0) & (rank >= top_k.unsqueeze(1))
    cut |= ranked < min_p.unsqueeze(1) * ranked[:, :1]
    return ranked.masked_fill(cut, 0.0)
