"""Packed rows: each prompt is computed once for all its siblings.

The layout "shared_prompt"; the other one is in ``documents``. One row holds a prompt followed by
its responses. A response token sees the prompt and its own response, nothing of its siblings;
position ids restart after the prompt, so every token gets exactly the context that it had when it
was sampled:

    ids        p0 p1 p2 | a0 a1 | b0 b1 b2
    positions   0  1  2 |  3  4 |  3  4  5
    segment    -1 -1 -1 |  0  0 |  1  1  1

The last token of a response predicts nothing and is left out of the row. Rows are padded on the
right; causality keeps every real token from seeing the padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import ConfigurationError

_PROMPT = -1
_PADDING = -2


@dataclass(frozen=True, slots=True)
class Response:
    """One response of a row. ``offset`` is the place of its first token in the update's tokens."""

    token_ids: Sequence[int]
    offset: int


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and some or all of its responses."""

    prompt_ids: Sequence[int]
    responses: tuple[Response, ...]

    @property
    def num_tokens(self) -> int:
        """Input tokens of the row: the last token of a response is only predicted."""
        return len(self.prompt_ids) + sum(input_length(r.token_ids) for r in self.responses)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through the model together. B rows of L tokens, N scored response tokens."""

    input_ids: Tensor  # [B, L] int64
    position_ids: Tensor  # [B, L] int64
    segments: Tensor  # [B, L] int64: -1 prompt, 0.. response, -2 padding
    predictors: Tensor  # [N] flat index into [B * L] of the position that predicts the token
    targets: Tensor  # [N] the token ids
    token_index: Tensor  # [N] index into the update's flat response tokens
    num_model_tokens: int
    """Real tokens of the rows, predicted last tokens included, padding excluded."""
    document_lengths: tuple[int, ...] = ()
    """Tokens of the documents of a pack; none in rows that share a prompt."""
    route_tables: tuple[bytes, ...] = ()
    """Expert routes of the documents of a pack, one after the other, as engines returned them."""

    @property
    def is_filler(self) -> bool:
        """Whether nothing of it counts; see ``filler``."""
        return self.num_model_tokens == 0

    @property
    def num_input_tokens(self) -> int:
        """Real tokens that are fed to the model."""
        return int((self.segments != _PADDING).sum())

    def attention_bias(self, dtype: torch.dtype) -> Tensor:
        """Additive mask [B, 1, L, L]: 0 where a token may look, the dtype's minimum elsewhere."""
        keys, queries = self.segments[:, None, :], self.segments[:, :, None]
        length = self.segments.shape[1]
        device = self.segments.device
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        allowed = causal & ((keys == _PROMPT) | (keys == queries))
        bias = torch.zeros(allowed.shape, dtype=dtype, device=device)
        return bias.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]

    def to(self, device: torch.device) -> "MicroBatch":
        """The same batch on ``device``."""
        if self.input_ids.device == device:
            return self
        return MicroBatch(
            input_ids=on_device(self.input_ids, device),
            position_ids=on_device(self.position_ids, device),
            segments=on_device(self.segments, device),
            predictors=on_device(self.predictors, device),
            targets=on_device(self.targets, device),
            token_index=on_device(self.token_index, device),
            num_model_tokens=self.num_model_tokens,
            document_lengths=self.document_lengths,
            route_tables=self.route_tables,
        )


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device``; to a GPU it is made while this process goes on."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def filler() -> MicroBatch:
    """One token that predicts nothing: gradients of zero.

    A rank that has fewer micro-batches than another computes fillers, because the weights that
    both hold in parts are gathered by both.
    """
    nothing = torch.zeros(0, dtype=torch.long)
    token = torch.zeros(1, 1, dtype=torch.long)
    return MicroBatch(token, token, token, nothing, nothing, nothing, num_model_tokens=0)


def input_length(response_ids: Sequence[int]) -> int:
    """Tokens of a response that are fed to the model."""
    return max(0, len(response_ids) - 1)


def split_row(row: Row, budget: int) -> list[Row]:
    """Cut a row into rows of at most ``budget`` tokens, each with the prompt; never a response.

    Raises:
        ConfigurationError: one response with its prompt is longer than the budget.
    """
    rows: list[Row] = []
    taken: list[Response] = []
    used = len(row.prompt_ids)
    for response in row.responses:
        length = input_length(response.token_ids)
        if len(row.prompt_ids) + length > budget:
            raise ConfigurationError(
                f"a sample of {len(row.prompt_ids)} prompt and {len(response.token_ids)} response "
                f"tokens does not fit trainer.micro_batch_tokens = {budget}; raise it to at least "
                f"{len(row.prompt_ids) + length}"
            )
        if taken and used + length > budget:
            rows.append(Row(row.prompt_ids, tuple(taken)))
            taken, used = [], len(row.prompt_ids)
        taken.append(response)
        used += length
    if taken:
        rows.append(Row(row.prompt_ids, tuple(taken)))
    return rows


def micro_batches(rows: Sequence[Row], budget: int) -> list[MicroBatch]:
    """Batch rows of similar length so that rows x longest row stays within ``budget`` tokens."""
    pieces = [piece for row in rows for piece in split_row(row, budget)]
    pieces.sort(key=lambda row: -row.num_tokens)  # stable: equal lengths keep their order
    batches: list[MicroBatch] = []
    start = 0
    while start < len(pieces):
        count = max(1, budget // max(1, pieces[start].num_tokens))
        batches.append(collate(pieces[start : start + count]))
        start += count
    return batches


def collate(rows: Sequence[Row]) -> MicroBatch:
    """Lay rows out as one padded batch."""
    length = max(row.num_tokens for row in rows)
    ids: list[list[int]] = []
    positions: list[list[int]] = []
    segments: list[list[int]] = []
    predictors: list[int] = []
    targets: list[int] = []
    token_index: list[int] = []
    for place, row in enumerate(rows):
        num_prompt = len(row.prompt_ids)
        row_ids, row_positions = list(row.prompt_ids), list(range(num_prompt))
        row_segments = [_PROMPT] * num_prompt
        for segment, response in enumerate(row.responses):
            num_input = input_length(response.token_ids)
            if response.token_ids:
                first = place * length + len(row_ids)
                predictors.append(place * length + num_prompt - 1)
                predictors.extend(range(first, first + num_input))
            targets.extend(response.token_ids)
            token_index.extend(range(response.offset, response.offset + len(response.token_ids)))
            row_ids.extend(response.token_ids[:num_input])
            row_positions.extend(range(num_prompt, num_prompt + num_input))
            row_segments.extend([segment] * num_input)
        padding = length - len(row_ids)
        ids.append(row_ids + [0] * padding)
        positions.append(row_positions + [0] * padding)
        segments.append(row_segments + [_PADDING] * padding)
    return MicroBatch(
        input_ids=torch.tensor(ids),
        position_ids=torch.tensor(positions),
        segments=torch.tensor(segments),
        predictors=torch.tensor(predictors, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        token_index=torch.tensor(token_index, dtype=torch.long),
        num_model_tokens=sum(
            len(row.prompt_ids) + sum(len(r.token_ids) for r in row.responses) for row in rows
        ),
    )
