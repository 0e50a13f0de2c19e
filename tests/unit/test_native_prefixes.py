"""Which running request lends the longest beginning of a context."""

import random
import time

from workers.engines.native.prefixes import MAX_CANDIDATES, MIN_SHARED, Prefixes, shared_length
from workers.engines.native.request import Request, Sampling

SAMPLING = Sampling(1.0, 1.0, -1, 0.0, 8, 0, (), (), 0)


def holder(rid: str, key: tuple[int, ...]) -> Request:
    request = Request(rid, list(key), SAMPLING, None, False, False, time.monotonic())
    request.prompt_key = key
    return request


def counted(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Token by token."""
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length


def test_shared_length_equals_counting() -> None:
    dice = random.Random(3)
    for _ in range(500):
        one = tuple(dice.randrange(3) for _ in range(dice.randrange(12)))
        cut = dice.randrange(len(one) + 1)
        other = one[:cut] + tuple(dice.randrange(3) for _ in range(dice.randrange(12)))
        assert shared_length(one, other) == counted(one, other)


def test_the_longest_of_the_newest_lends() -> None:
    dice = random.Random(4)
    start = tuple(range(MIN_SHARED))
    for _ in range(200):
        index, held = Prefixes(), []
        for number in range(dice.randrange(1, MAX_CANDIDATES + 1)):
            key = start + tuple(dice.randrange(2) for _ in range(dice.randrange(1, 10)))
            held.append(holder(str(number), key))
            index.add(held[-1])
        for gone in dice.sample(held, dice.randrange(len(held))):
            index.drop(gone)
            held.remove(gone)
        key = start + tuple(dice.randrange(2) for _ in range(dice.randrange(1, 10)))
        usable = [
            min(counted(key, h.prompt_key), len(key) - 1, len(h.prompt_key) - 1) for h in held
        ]
        donor = index.longest(key)
        assert donor is not None
        assert donor.length == max(usable)
        assert donor.request in held


def test_short_or_foreign_beginnings_are_not_lent() -> None:
    index = Prefixes()
    index.add(holder("short", (1, 2, 3)))
    index.add(holder("long", tuple(range(100, 140))))
    assert index.longest((1, 2, 3, 4)) is None
    assert index.longest(tuple(range(50))) is None
    assert index.same((1, 2, 3)) is not None
    index.clear()
    assert index.same((1, 2, 3)) is None
    assert index.longest(tuple(range(100, 150))) is None
