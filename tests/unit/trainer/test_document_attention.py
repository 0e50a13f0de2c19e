"""How layers reach the kernel for documents, with a reference in its place; the GPU has its own."""

import contextlib
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface

from workers.trainers import document_attention
from workers.trainers.document_attention import DocumentBlocks
from workers.trainers.varlen_attention import Bounds, kernel_dtype

LENGTHS = (5, 1, 9, 2)
CPU = torch.device("cpu")


def by_formula(query, key, value, bounds, scale):
    """softmax(q k' scale) v over earlier tokens of the document, query by query."""
    group = query.shape[1] // key.shape[1]
    offsets = bounds.offsets.tolist()
    rows = []
    for first, end in pairwise(offsets):
        for token in range(first, end):
            heads = []
            for head in range(query.shape[1]):
                seen = slice(first, token + 1)
                scores = key[seen, head // group] @ query[token, head] * scale
                heads.append(scores.softmax(0) @ value[seen, head // group])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.fixture
def layer():
    """A call of one attention layer with 4 query heads and 2 key heads, and its inputs."""
    torch.manual_seed(5)
    tokens = sum(LENGTHS)
    sizes = {"query": 4, "key": 2, "value": 2}
    inputs = {
        name: torch.randn(1, heads, tokens, 8, dtype=torch.float64, requires_grad=True)
        for name, heads in sizes.items()
    }
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)

    def call(**options):
        attention = AttentionInterface()["documents_sdpa"]
        blocks = DocumentBlocks(LENGTHS, CPU)
        options = {"scaling": 0.3, "document_blocks": blocks, **options}
        return attention(module, attention_mask=None, **inputs, **options)[0]

    return call, inputs


@pytest.fixture
def calls(monkeypatch):
    """The reference in the kernel's place, and how often it was called."""
    seen = []

    def attend(*arguments):
        *layer, kernel = arguments
        assert kernel == "torch"
        seen.append(layer)
        return by_formula(*layer)

    monkeypatch.setattr(document_attention, "kernel_dtype", lambda query, value: query.dtype)
    monkeypatch.setattr(document_attention, "attend", attend)
    return seen


def test_bounds_by_hand():
    bounds = Bounds.of([5, 1, 9, 2], CPU)
    assert bounds.offsets.tolist() == [0, 5, 6, 15, 17]
    assert bounds.offsets.dtype == torch.int32
    assert bounds.longest == 9


def test_the_kernel_is_for_gpus():
    half = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16)
    assert kernel_dtype(half, half) is None


def test_padded_rows_follow_the_formula(layer):
    call, inputs = layer
    parts = [part[0].transpose(0, 1) for part in inputs.values()]
    expected = by_formula(*parts, Bounds.of(LENGTHS, CPU), 0.3)
    assert (call()[0] - expected).abs().max() <= 1e-12


def test_a_layer_gives_and_takes_the_same_with_the_kernel(layer, calls, monkeypatch):
    call, inputs = layer
    found = call()
    gradients = torch.autograd.grad(found.square().sum(), list(inputs.values()))
    assert len(calls) == 1
    assert found.shape == (1, sum(LENGTHS), 4, 8)
    monkeypatch.setattr(document_attention, "kernel_dtype", lambda query, value: None)
    padded = call()
    assert (found - padded).abs().max() <= 1e-12
    expected = torch.autograd.grad(padded.square().sum(), list(inputs.values()))
    for gradient, other in zip(gradients, expected, strict=True):
        assert (gradient - other).abs().max() <= 1e-12


def test_what_the_kernel_cannot_do_is_left_to_the_layers_own_attention(layer, calls):
    call, _inputs = layer
    with contextlib.suppress(ValueError):  # the newer one refuses it
        call(softcap=20.0)
    call(dropout=0.5)
    assert not calls


def test_without_documents_a_layer_is_causal_over_all_its_tokens(layer, calls):
    call, inputs = layer
    found = call(document_blocks=None)[0]
    parts = [part[0].transpose(0, 1) for part in inputs.values()]
    expected = by_formula(*parts, Bounds.of([sum(LENGTHS)], CPU), 0.3)
    assert (found - expected).abs().max() <= 1e-12
    assert not calls
