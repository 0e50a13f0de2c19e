"""Packs of whole documents: every sample computed by itself, one after the other in one row.

A document is a prompt with one response. It sees nothing of its neighbors and its position ids
start at 0. All its tokens are fed, the last one too although it predicts nothing, so that what is
counted per token is counted for every token exactly once:

    ids        p0 p1 p2 a0 a1 | p0 p1 p2 b0 b1 b2
    positions   0  1  2  3  4 |  0  1  2  3  4  5
    segment     0  0  0  0  0 |  1  1  1  1  1  1
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from models.errors import ConfigurationError
from workers.trainers.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class Document:
    """One sample. ``offset`` is the place of its first response token in the update's tokens."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    offset: int
    routes: bytes | None = None
    """int32 [tokens - 1, layers, top_k] of the engine; none without replay."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are fed to the model: all."""
        return len(self.prompt_ids) + len(self.response_ids)


def greedy_packs(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Positions of ``lengths`` in packs of at most ``budget`` tokens, in their order.

    A pack is closed when the next length does not fit: 5, 3, 2, 6, 1 within 8 make
    [[0, 1], [2, 3], [4]].

    Raises:
        ConfigurationError: one length is greater than the budget.
    """
    packs: list[list[int]] = []
    used = budget
    for position, length in enumerate(lengths):
        if length > budget:
            raise ConfigurationError(
                f"a sample of {length} prompt and response tokens does not fit "
                f"trainer.micro_batch_tokens = {budget}; raise it to at least {length}"
            )
        if used + length > budget:
            packs.append([])
            used = 0
        packs[-1].append(position)
        used += length
    return packs


def leveled_packs(packs: Sequence[list[int]], count: int) -> list[list[int]]:
    """Cut the pack with most samples in half, again and again, until there are ``count`` packs.

    Order is kept. A pack of one sample cannot be cut, so fewer samples than ``count`` make fewer
    packs. Ranks whose packs are as many go through the model as often.
    """
    leveled = [list(pack) for pack in packs]
    while len(leveled) < count:
        place = max(range(len(leveled)), key=lambda i: len(leveled[i]), default=None)
        if place is None or len(leveled[place]) < 2:
            break
        pack = leveled[place]
        half = (len(pack) + 1) // 2
        leveled[place : place + 1] = [pack[:half], pack[half:]]
    return leveled


def collate_documents(documents: Sequence[Document]) -> MicroBatch:
    """Lay documents out as one pack: a row without padding."""
    lengths = tuple(document.num_tokens for document in documents)
    starts = list(accumulate(lengths, initial=0))
    ids = [part for d in documents for part in (d.prompt_ids, d.response_ids)]
    return MicroBatch(
        input_ids=_joined(ids)[None],
        position_ids=_ranges((0, length) for length in lengths)[None],
        segments=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None],
        predictors=_ranges(
            (start + len(d.prompt_ids) - 1, len(d.response_ids))
            for start, d in zip(starts, documents, strict=False)
        ),
        targets=_joined([d.response_ids for d in documents]),
        token_index=_ranges((d.offset, len(d.response_ids)) for d in documents),
        num_model_tokens=starts[-1],
        document_lengths=lengths,
        route_tables=tuple(d.routes for d in documents if d.routes is not None),
    )


def _joined(parts: Sequence[Sequence[int]]) -> Tensor:
    """Ids, one part after the other."""
    return torch.from_numpy(np.concatenate([np.array(part, dtype=np.int64) for part in parts]))


def _ranges(parts: Iterable[tuple[int, int]]) -> Tensor:
    """first, first + 1, ... of every (first, count), one after the other."""
    return torch.cat([torch.arange(first, first + count) for first, count in parts])
