"""Packed rows: layout by hand, and log-probs and gradients equal to unpacked forwards."""

import pytest
import torch

from models.errors import ConfigurationError
from workers.trainers.batch import TrainingBatch, rows_of
from workers.trainers.logprobs import Scorer
from workers.trainers.packing import Response, Row, collate, micro_batches, split_row

ROW = Row([10, 11, 12], (Response([20, 21, 22], 0), Response([30], 3), Response([40, 41], 4)))


def test_layout_restarts_positions_and_leaves_last_tokens_out():
    batch = collate([ROW, Row([50], (Response([60, 61], 6),))])
    assert batch.input_ids.tolist() == [[10, 11, 12, 20, 21, 40], [50, 60, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3], [0, 1, 0, 0, 0, 0]]
    assert batch.segments.tolist() == [[-1, -1, -1, 0, 0, 2], [-1, 0, -2, -2, -2, -2]]
    assert batch.predictors.tolist() == [2, 3, 4, 2, 2, 5, 6, 7]
    assert batch.targets.tolist() == [20, 21, 22, 30, 40, 41, 60, 61]
    assert batch.token_index.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.num_model_tokens == 12


def test_responses_see_the_prompt_and_themselves_only():
    open_to = collate([ROW]).attention_bias(torch.float32)[0, 0] == 0
    assert open_to.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


def test_rows_are_split_within_the_budget_and_never_a_response():
    rows = split_row(ROW, 5)
    assert [[r.offset for r in row.responses] for row in rows] == [[0, 3], [4]]
    assert all(row.num_tokens <= 5 for row in rows)


def test_a_sample_longer_than_the_budget_is_refused_with_the_needed_value():
    with pytest.raises(ConfigurationError, match="raise it to at least 5"):
        split_row(ROW, 4)


def test_micro_batches_hold_the_budget_after_padding(make_groups):
    batch = TrainingBatch.of(make_groups(num_groups=9))
    micro = micro_batches(rows_of(batch, range(36)), 64)
    assert all(m.input_ids.numel() <= 64 for m in micro)
    seen = torch.cat([m.token_index for m in micro]).sort().values
    assert seen.tolist() == list(range(batch.num_tokens))


def unpacked_logprobs(model, batch, temperature):
    """Log-probs and entropies by one plain forward a sample."""
    logprobs, entropies = [], []
    for sample in batch.samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
        log_p = torch.log_softmax(logits / temperature, -1)
        logprobs.append(log_p[torch.arange(len(sample.response_ids)), sample.response_ids])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("budget", "chunk", "temperature"), [(4096, 1024, 1.0), (24, 16, 0.7)])
def test_log_probs_and_gradients_equal_an_unpacked_forward(
    make_model, make_groups, family, attention, budget, chunk, temperature
):
    model = make_model(family)
    batch = TrainingBatch.of(make_groups(num_groups=3, size=4))
    generator = torch.Generator().manual_seed(1)
    by_logprob = torch.randn(batch.num_tokens, generator=generator)
    by_entropy = torch.randn(batch.num_tokens, generator=generator)
    logprobs, entropies = unpacked_logprobs(model, batch, temperature)
    ((logprobs * by_logprob).sum() + (entropies * by_entropy).sum()).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    model.set_attn_implementation(attention)
    scorer = Scorer.of(model, temperature, chunk, torch.float32)
    scored = torch.full((batch.num_tokens, 2), float("nan"))
    for micro in micro_batches(rows_of(batch, range(len(batch.samples))), budget):
        scored[micro.token_index] = torch.stack(scorer.score(micro), -1)
        scorer.backward(
            micro,
            lambda new, entropy, index: (
                (new * by_logprob[index]).sum() + (entropy * by_entropy[index]).sum()
            ),
        )
    assert (scored[:, 0] - logprobs).abs().max() <= 1e-5
    assert (scored[:, 1] - entropies).abs().max() <= 1e-5
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=2e-5, rtol=1e-4), name


def test_bfloat16_stays_close_to_float32(make_model, make_groups):
    model = make_model("qwen3")
    batch = TrainingBatch.of(make_groups())
    (micro,) = micro_batches(rows_of(batch, range(8)), 4096)
    exact, _ = Scorer.of(model, 1.0, 1024, torch.float32).score(micro)
    rounded, _ = Scorer.of(model, 1.0, 1024, torch.bfloat16).score(micro)
    assert 0 < (exact - rounded).abs().mean() < 0.1
