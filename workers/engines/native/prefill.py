"""Prefill: what running requests hold of a context is copied, the rest is computed, each once.

::

    leaders     nobody holds a beginning of the context: computed wholly
    extensions  somebody does: that is copied, the rest computed on top of it
    followers   somebody holds all of it: copied

Siblings of a group follow each other; after new weights, when they come back with different tokens
of their own, one of them leads and the others extend the prompt that they share.

All context tokens but the last are written to the cache; the last one is fed by the first decode
step, so that a new request is from then on a row like any other.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from workers.engines.native.decoder import Decoder
from workers.engines.native.kv import KvCache
from workers.engines.native.prefixes import Donor, Prefixes
from workers.engines.native.request import Request
from workers.engines.native.rows import Rows

MAX_PREFILL_TOKENS = 4096
"""Padded tokens of one prefill batch: bounds its memory and the pause of running requests."""
SCORE_CHUNK = 256
"""Prompt tokens whose logits exist at once when a prompt is scored."""


class Extension(NamedTuple):
    """A request and the running one that lends it the beginning of its context."""

    request: Request
    donor: Donor


class Prefill:
    """Brings picked requests into slots. Knows which running request holds which prompt."""

    def __init__(self, decoder: Decoder, cache: KvCache, one_by_one: bool) -> None:
        """``one_by_one``: never two prompts in a batch, so that neither depends on the other."""
        self._decoder, self._cache = decoder, cache
        self._one_by_one = one_by_one
        self._live = Prefixes()
        self.hit_rate = 0.0
        """Share of the newest run's context tokens whose KV was copied instead of computed."""

    def run(self, picked: list[Request], rows: Rows) -> None:
        """Give every picked request a slot with its context's KV."""
        leaders, extensions, followers = self._split(picked)
        leaders.sort(key=lambda request: len(request.prompt_key))
        for batch in self._batches(leaders):
            self._compute(batch, rows)
        extensions.sort(key=_num_missing)
        for part in _extension_batches(extensions):
            self._extend(part, rows)
        if followers:
            self._copy(followers, rows)
        cached = sum(request.cached_tokens for request in picked)
        self.hit_rate = cached / max(1, sum(request.context_length for request in picked))

    def leave(self, request: Request) -> None:
        """``request`` loses its slot and can no longer lend its rows."""
        self._live.drop(request)

    def forget(self) -> None:
        """No row may be lent any more: its KV belongs to older weights."""
        self._live.clear()

    def _split(self, picked: list[Request]) -> tuple[list[Request], list[Extension], list[Request]]:
        """Leaders, extensions and followers, by what runs and by leaders that come before them."""
        leaders: list[Request] = []
        extensions: list[Extension] = []
        followers: list[Request] = []
        planned, leading = set[tuple[int, ...]](), Prefixes()
        for request in picked:
            key = request.prompt_key = tuple(request.input_ids + request.kept_ids)
            request.context_length = len(key)
            scored = request.prompt_logprobs_from is not None and request.input_logprobs is None
            if not scored and (key in planned or self._live.same(key) is not None):
                followers.append(request)
                continue
            planned.add(key)
            donor = None if scored or self._one_by_one else self._donor(key, leading)
            if donor is not None:
                extensions.append(Extension(request, donor))
            else:
                leaders.append(request)
                leading.add(request)
        return leaders, extensions, followers

    def _donor(self, key: tuple[int, ...], leading: Prefixes) -> Donor | None:
        found = [donor for index in (self._live, leading) if (donor := index.longest(key))]
        return max(found, key=lambda donor: donor.length, default=None)

    def _batches(self, leaders: list[Request]) -> Iterator[list[Request]]:
        """Neighbors in length share a batch as long as its padded size stays bounded."""
        batch: list[Request] = []
        for request in leaders:
            padded = (len(batch) + 1) * request.context_length
            if batch and (self._one_by_one or padded > MAX_PREFILL_TOKENS):
                yield batch
                batch = []
            batch.append(request)
        if batch:
            yield batch

    def _compute(self, batch: list[Request], rows: Rows) -> None:
        first, longest = len(rows.requests), batch[-1].context_length - 1
        scored = [r for r in batch if r.prompt_logprobs_from is not None]
        if longest:
            tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
            for row, request in enumerate(batch):
                context = torch.tensor(request.prompt_key[:-1], dtype=torch.int64)
                tokens[row, : len(context)] = context
            hidden = self._decoder.prefill(tokens, self._cache, first, bool(scored))
        for row, request in enumerate(batch):
            request.cached_tokens = 0
            self._join(request, rows)
            if request in scored and request.input_logprobs is None:
                states = hidden[row] if longest and hidden is not None else torch.empty(0)
                request.input_logprobs = self._score(request, states)

    def _extend(self, batch: list[Extension], rows: Rows) -> None:
        first = len(rows.requests)
        lent = [extension.donor.length for extension in batch]
        self._cache.share([each.donor.request.slot for each in batch], first, max(lent))
        missing = _num_missing(batch[-1])
        if missing:
            tokens = torch.zeros(len(batch), missing, dtype=torch.int64)
            for row, (request, donor) in enumerate(batch):
                rest = torch.tensor(request.prompt_key[donor.length : -1], dtype=torch.int64)
                tokens[row, : len(rest)] = rest
            self._decoder.prefill(tokens, self._cache, first, False, torch.tensor(lent))
        for request, donor in batch:
            request.cached_tokens = donor.length
            self._join(request, rows)

    def _copy(self, followers: list[Request], rows: Rows) -> None:
        sources = [holder.slot for r in followers if (holder := self._live.same(r.prompt_key))]
        longest = max(request.context_length - 1 for request in followers)
        if longest:
            self._cache.share(sources, len(rows.requests), longest)
        for request in followers:
            request.cached_tokens = request.context_length - 1
            self._join(request, rows)

    def _join(self, request: Request, rows: Rows) -> None:
        rows.append(request, request.prompt_key[-1])
        self._live.add(request)

    def _score(self, request: Request, hidden: torch.Tensor) -> list[tuple[float | None, int]]:
        """Log-probs of the prompt tokens at temperature 1; the first one has none."""
        start = request.prompt_logprobs_from or 0
        ids = request.input_ids
        result: list[tuple[float | None, int]] = [(None, ids[start])] if start < len(ids) else []
        for low in range(start, len(ids) - 1, SCORE_CHUNK):
            high = min(low + SCORE_CHUNK, len(ids) - 1)
            scores = self._decoder.logits(hidden[low:high]).float().log_softmax(-1)
            targets = torch.tensor(ids[low + 1 : high + 1]).unsqueeze(1)
            values = scores.gather(1, targets).squeeze(1).tolist()
            result.extend(zip(values, ids[low + 1 : high + 1], strict=True))
        return result


def _num_missing(extension: Extension) -> int:
    """Context tokens that must be computed; the last one of a context is not prefilled."""
    return extension.request.context_length - 1 - extension.donor.length


def _extension_batches(extensions: list[Extension]) -> Iterator[list[Extension]]:
    """Neighbors in missing tokens share a batch as long as its padded size stays bounded."""
    batch: list[Extension] = []
    for extension in extensions:
        if batch and (len(batch) + 1) * _num_missing(extension) > MAX_PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(extension)
    if batch:
        yield batch
