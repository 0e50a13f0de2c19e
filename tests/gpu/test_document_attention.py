"""Whole models on a GPU: documents packed by the kernel beside each document by itself.

The reference is the same model in float64, one document at a time, by a mask. bfloat16 alone puts
an error on log-probs and gradients, which is measured the same way: one document at a time, in
bfloat16, without the kernel. Packing must not add to it: a bound of 1.25 times that error leaves
room for the chance in the roundings. A pack whose documents see each other, the fault looked for,
is off by many times as much.
"""

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from workers.trainers import document_attention
from workers.trainers.document_attention import use_document_attention
from workers.trainers.documents import Document, collate_documents
from workers.trainers.logprobs import Scorer
from workers.trainers.routers import find_routers
from workers.trainers.routing import Routing

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
LAYERS, EXPERTS, TOP_K, VOCABULARY = 3, 8, 2, 200
RESPONSES = (1, 40, 7, 150, 64, 3, 90)


def make_model(family, experts):
    """A random model of three layers with grouped heads."""
    torch.manual_seed(7)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    if family == "qwen3":
        config = Qwen3Config(**sizes)
    else:
        mixture = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
        config = Qwen3MoeConfig(moe_intermediate_size=64, norm_topk_prob=True, **mixture, **sizes)
        config._experts_implementation = experts
    config._attn_implementation = "sdpa"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(GPU).eval()


def make_documents(routed):
    """Prompts of 11 tokens, the first of one; routes are given, lest a rounding choose experts."""
    rng = random.Random(3)
    documents, offset = [], 0
    for place, count in enumerate(RESPONSES):
        prompt = [rng.randrange(VOCABULARY) for _ in range(11 if place else 1)]
        response = [rng.randrange(VOCABULARY) for _ in range(count)]
        fed = len(prompt) + count - 1
        routes = torch.stack(
            [torch.tensor(rng.sample(range(EXPERTS), TOP_K)) for _ in range(fed * LAYERS)]
        )
        table = routes.to(torch.int32).numpy().tobytes() if routed else None
        documents.append(Document(prompt, response, offset, table))
        offset += count
    return documents


def logprobs_and_gradients(model, micros, dtype):
    """Log-probs [N] and the gradient of a weighted sum of them, all parameters in one vector."""
    routers = find_routers(model)
    scorer = Scorer.of(model, 0.9, 64, dtype, Routing(routers, replay=True) if routers else None)
    total = sum(RESPONSES)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(total, generator=generator, dtype=torch.float64).to(GPU)
    found = torch.full((total,), torch.nan, dtype=torch.float64, device=GPU)
    model.zero_grad(set_to_none=True)
    for micro in micros:
        found[micro.token_index.to(GPU)] = scorer.score(micro)[0].double()
        scorer.backward(micro, lambda logprobs, _entropies, i: (weights[i] * logprobs).sum())
    return found, torch.cat([p.grad.double().flatten() for p in model.parameters()])


@pytest.fixture
def kernel_calls(monkeypatch):
    """Counts what reaches the kernel."""
    seen = []
    attend = document_attention.attend

    def counted(*arguments):
        seen.append(arguments[0].dtype)
        return attend(*arguments)

    monkeypatch.setattr(document_attention, "attend", counted)
    return seen


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_packing_adds_nothing_to_the_error_of_bfloat16(family, kernel_calls):
    documents = make_documents(family == "qwen3_moe")
    alone = [collate_documents([document]) for document in documents]
    pack = collate_documents(documents)
    exact = logprobs_and_gradients(make_model(family, "eager").double(), alone, torch.float64)
    model = make_model(family, "grouped_mm")
    single = logprobs_and_gradients(model, alone, torch.bfloat16)
    open_pack = replace(pack, segments=torch.zeros_like(pack.segments))
    leaking = logprobs_and_gradients(model, [open_pack], torch.bfloat16)
    assert not kernel_calls
    use_document_attention(model)
    packed = logprobs_and_gradients(model, [pack], torch.bfloat16)
    assert kernel_calls == [torch.bfloat16] * 2 * LAYERS
    for place, kind in enumerate(("log-probs", "gradient")):
        want = exact[place]
        by_itself, by_kernel, with_leak = (
            float((found[place] - want).norm() / want.norm()) for found in (single, packed, leaking)
        )
        assert by_kernel <= 1.25 * by_itself, kind
        assert by_itself <= 0.05, kind
        assert with_leak >= 4 * by_itself, kind


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_float32_is_computed_without_the_kernel(family, kernel_calls):
    documents = make_documents(family == "qwen3_moe")
    alone = [collate_documents([document]) for document in documents]
    exact = logprobs_and_gradients(make_model(family, "eager").double(), alone, torch.float64)
    model = make_model(family, "eager")
    use_document_attention(model)
    packed = logprobs_and_gradients(model, [collate_documents(documents)], torch.float32)
    assert not kernel_calls
    for want, found in zip(exact, packed, strict=True):
        assert (found - want).norm() <= 1e-5 * want.norm()
