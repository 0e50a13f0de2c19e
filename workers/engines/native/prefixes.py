"""Which running requests hold the KV of which contexts, so that new ones can start from it."""

from itertools import islice
from typing import NamedTuple

from workers.engines.native.request import Request

MIN_SHARED = 16
"""A common beginning of fewer tokens is computed again: copying it would save nothing."""
MAX_CANDIDATES = 8
"""Requests looked at for the longest common beginning, newest first: siblings arrive together."""

Tokens = tuple[int, ...]


class Donor(NamedTuple):
    """A request whose first ``length`` context tokens begin another context too."""

    request: Request
    length: int


class Prefixes:
    """Contexts of requests, found by all of their tokens or by a common beginning."""

    def __init__(self) -> None:
        self._whole: dict[Tokens, dict[str, Request]] = {}
        self._starts: dict[Tokens, dict[str, Request]] = {}

    def add(self, request: Request) -> None:
        """``request`` may lend the KV of its context from now on."""
        key = request.prompt_key
        self._whole.setdefault(key, {})[request.rid] = request
        if len(key) > MIN_SHARED:
            self._starts.setdefault(key[:MIN_SHARED], {})[request.rid] = request

    def drop(self, request: Request) -> None:
        """``request`` may not lend any more; nothing when it never could."""
        key = request.prompt_key
        for index, part in ((self._whole, key), (self._starts, key[:MIN_SHARED])):
            holders = index.get(part)
            if holders and holders.pop(request.rid, None) and not holders:
                del index[part]

    def clear(self) -> None:
        """Nobody may lend: the KV belongs to older weights."""
        self._whole.clear()
        self._starts.clear()

    def same(self, key: Tokens) -> Request | None:
        """A request whose context is ``key``."""
        holders = self._whole.get(key)
        return next(iter(holders.values())) if holders else None

    def longest(self, key: Tokens) -> Donor | None:
        """The request that shares most of ``key``, of what is written to the cache of both.

        The last token of a context is fed by its first decode step, so it never counts.
        """
        best: Donor | None = None
        holders = self._starts.get(key[:MIN_SHARED], {})
        for request in islice(reversed(holders.values()), MAX_CANDIDATES):
            length = min(shared_length(key, request.prompt_key), len(key) - 1)
            length = min(length, len(request.prompt_key) - 1)
            if length >= MIN_SHARED and (best is None or length > best.length):
                best = Donor(request, length)
        return best


def shared_length(one: Tokens, other: Tokens) -> int:
    """Number of tokens that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # [0, low) is equal; slices compare at the speed of C
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
