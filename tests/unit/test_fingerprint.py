"""Fingerprints of tensors: the stated formula in plain integers, and every error that counts."""

import struct
from collections.abc import Iterator

import pytest
import torch

from tests.support.counted_operations import CountedOperations
from workers import fingerprint
from workers.fingerprint import fingerprints

MASK = (1 << 64) - 1


def of(tensor: torch.Tensor) -> str:
    return fingerprints([("t", tensor)])["t"]


def splitmix(number: int) -> int:
    z = ((number + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def shifted(value: int, bits: int) -> int:
    """Shift right, the sign is kept."""
    return ((value - (1 << 64) if value >> 63 else value) >> bits) & MASK


def by_hand(data: bytes, chunk_words: int) -> str:
    data += b"\0" * (-len(data) % 8)
    total = 0
    for place, word in enumerate(struct.unpack(f"<{len(data) // 8}Q", data)):
        chunk, index = divmod(place, chunk_words)
        mixed = (word + splitmix(chunk)) & MASK
        mixed ^= shifted(mixed, 32)
        mixed = mixed * (splitmix(index) | 1) & MASK
        mixed ^= shifted(mixed, 29)
        total += mixed
    return f"{total & MASK:016x}"


def test_splitmix64_is_the_published_one() -> None:
    # First outputs for the seed 0, from the reference implementation of the generator.
    assert [splitmix(n) for n in range(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("chunk_words", [3, 8, 1 << 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_it_is_the_stated_sum(
    chunk_words: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "CHUNK_WORDS", chunk_words)
    generator = torch.Generator().manual_seed(1)
    for size in (1, 4, 7, 64, 101):
        tensor = (torch.randn(size, generator=generator) * 50).to(dtype)
        data = tensor.view(torch.uint8).numpy().tobytes()
        assert of(tensor) == by_hand(data, chunk_words)


def test_views_of_any_layout_count_as_their_elements() -> None:
    whole = torch.randn(9, 14).bfloat16()
    for view in (whole[2:5], whole[1:, 3:8], whole.T, whole.view(-1)[1:60]):
        assert of(view) == of(view.contiguous().clone())


def test_names_keep_their_tensors() -> None:
    tensors = {name: torch.randn(5) for name in "cab"}
    assert fingerprints(tensors.items()) == {name: of(each) for name, each in tensors.items()}
    assert fingerprints([]) == {}


@pytest.mark.parametrize("waiting_words", [0, 40, 1 << 23])
def test_many_tensors_of_few_sizes_are_the_stated_sums(
    waiting_words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interleaved, fewer and more of a size than are mixed together, each gone when it was read."""
    monkeypatch.setattr(fingerprint, "CHUNK_WORDS", 24)
    monkeypatch.setattr(fingerprint, "_WAITING_WORDS", waiting_words)
    monkeypatch.setattr(fingerprint, "_MOST_ROWS", 5)
    generator = torch.Generator().manual_seed(2)
    expected: dict[str, str] = {}

    def one_after_the_other() -> Iterator[tuple[str, torch.Tensor]]:
        memory = torch.empty(200)
        for number in range(60):
            size = (1, 24, 24, 5, 47, 0, 150, 8)[number % 8]  # of the last but one: 75 words
            tensor = memory[:size].copy_(torch.randn(size, generator=generator))
            expected[str(number)] = by_hand(tensor.numpy().tobytes(), 24)
            yield str(number), tensor
            memory.fill_(float("nan"))

    assert fingerprints(one_after_the_other()) == expected
    assert len(expected) == 60


def test_a_small_tensor_of_many_costs_no_operation_of_its_own() -> None:
    """Put together, salted, three steps of two each and the sum: for all of one size."""
    tensors = {str(number): torch.ones(4, 4 + number % 4) for number in range(400)}
    fingerprints(tensors.items())  # makes the keys
    with CountedOperations() as counted:
        fingerprints(tensors.items())
    assert counted.number <= 4 * (1 + 1 + 3 * 2 + 1) + 2  # and all sums to the host
    one_after_the_other = iter(tensors.items())
    with CountedOperations() as counted:
        assert fingerprints(one_after_the_other) == fingerprints(tensors.items())
    assert counted.number > len(tensors)  # each is copied before the next one is asked for


def test_every_change_of_any_single_element_shows() -> None:
    tensor = torch.randn(6, 11).bfloat16()
    seen = {of(tensor)}
    for place in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(torch.int16).view(-1)[place] ^= 1  # the least bit
        seen.add(of(changed))
        changed.view(torch.int16).view(-1)[place] ^= -32768  # and the sign
        seen.add(of(changed))
    assert len(seen) == 1 + 2 * tensor.numel()


def test_order_signs_and_shared_errors_show() -> None:
    tensor = torch.randn(64, 8).bfloat16()
    swapped = tensor.clone()
    swapped[[3, 40]] = tensor[[40, 3]]
    two = tensor.clone()
    two.view(-1)[[3, 259]] *= -1  # the highest bits of two words
    others = (swapped, two, -tensor, tensor.roll(1, 0), tensor.T, torch.zeros_like(tensor))
    assert len({of(tensor), *map(of, others)}) == 1 + len(others)
