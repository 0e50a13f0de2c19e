"""Norms by torch's own kernel beside those of transformers."""

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from workers.trainers.document_attention import use_document_attention
from workers.trainers.documents import Document, collate_documents
from workers.trainers.logprobs import Scorer
from workers.trainers.norms import fuse_norms

FAMILIES = {"qwen3": 2 * 4 + 1, "llama": 2 * 2 + 1, "qwen3_moe": 3 * 4 + 1, "olmoe": 3 * 4 + 1}
"""Norms of two or three layers, with those of queries and keys, and the last one."""


@pytest.fixture
def make(make_model, make_mixture):
    def built(family):
        model = (make_mixture if family in ("qwen3_moe", "olmoe") else make_model)(family)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones would hide whether they count
                noise = torch.rand(parameter.shape, generator=generator)
                parameter.data.add_(noise - 0.5)
        use_document_attention(model)
        return model

    return built


def scored(model, dtype):
    """Log-probs, and the gradient of a weighted sum of them."""
    pack = collate_documents([Document([5, 6, 7], list(range(8, 8 + n)), n * 9) for n in (4, 7)])
    pack.token_index.copy_(torch.arange(11))
    scorer = Scorer.of(model, 0.9, 5, dtype)
    weights = torch.linspace(-1.0, 2.0, 11, dtype=torch.float64)
    model.zero_grad(set_to_none=True)
    logprobs, _ = scorer.score(pack)
    scorer.backward(pack, lambda lp, h, i: (weights[i] * (lp + 0.1 * h)).sum())
    gradient = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    return logprobs.double(), gradient


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_transformers(make, family):
    plain, fused = make(family), make(family)
    assert fuse_norms(fused) == FAMILIES[family]
    expected, found = scored(plain, torch.float32), scored(fused, torch.float32)
    assert (found[0] - expected[0]).abs().max() <= 1e-5
    assert (found[1] - expected[1]).norm() <= 1e-5 * expected[1].norm()
    assert expected[1].norm() > 0.1


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_they_add_nothing_to_the_error_of_bfloat16(make, family):
    exact = scored(make(family).double(), torch.float64)
    plain, fused = make(family), make(family)
    fuse_norms(fused)
    for position in (0, 1):
        gaps = [
            float((scored(model, torch.bfloat16)[position] - exact[position]).norm())
            for model in (plain, fused)
        ]
        assert gaps[1] <= 1.25 * gaps[0], (position, gaps)


def test_a_result_is_cast_once_where_products_alone_read_it(make):
    model, mixture = make("qwen3"), make("qwen3_moe")
    fuse_norms(model)
    fuse_norms(mixture)
    hidden, head = torch.randn(1, 3, 32), torch.randn(1, 3, 4, 8).bfloat16()
    layer, other = model.base_model.layers[0], mixture.base_model.layers[0]
    assert layer.input_layernorm(hidden).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.input_layernorm(hidden).dtype == torch.bfloat16
        assert layer.post_attention_layernorm(hidden).dtype == torch.bfloat16
        assert layer.self_attn.q_norm(head).dtype == torch.float32  # rotated next
        assert model.base_model.norm(hidden).dtype == torch.float32
        assert other.post_attention_layernorm(hidden).dtype == torch.float32  # read by a router


def test_other_norms_stay_as_they_are():
    config = Gemma2Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    assert fuse_norms(Gemma2ForCausalLM(config)) == 0  # they scale by one plus the weight
    lookalike = nn.Sequential(nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8))
    assert fuse_norms(lookalike) == 0  # torch's own has no need of it, or no eps of its own
