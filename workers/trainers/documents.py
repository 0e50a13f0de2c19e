"""Packs of whole documents: every sample computed by itself, one after the other in one row.

A document is a prompt with one response. It sees nothing of its neighbors and its position ids
start at 0. All its tokens are fed, the last one too although it predicts nothing, so that what is
counted per token is counted for every token exactly once:

    ids        p0 p1 p2 a0 a1 | p0 p1 p2 b0 b1 b2
    positions   0  1  2  3  4 |  0  1  2  3  4  5
    segment     0  0  0  0  0 |  1  1  1  1  1  1
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
    ids: list[int] = []
    positions: list[int] = []
    segments: list[int] = []
    predictors: list[int] = []
    targets: list[int] = []
    token_index: list[int] = []
    for segment, document in enumerate(documents):
        first = len(ids) + len(document.prompt_ids)
        num_response = len(document.response_ids)
        predictors.extend(range(first - 1, first - 1 + num_response))
        targets.extend(document.response_ids)
        token_index.extend(range(document.offset, document.offset + num_response))
        ids.extend(document.prompt_ids)
        ids.extend(document.response_ids)
        positions.extend(range(document.num_tokens))
        segments.extend([segment] * document.num_tokens)
    return MicroBatch(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        segments=torch.tensor([segments]),
        predictors=torch.tensor(predictors, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        token_index=torch.tensor(token_index, dtype=torch.long),
        num_model_tokens=len(ids),
        document_lengths=tuple(document.num_tokens for document in documents),
        route_tables=tuple(d.routes for d in documents if d.routes is not None),
    )
