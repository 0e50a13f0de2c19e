"""Packs of whole documents: layout by hand, and results equal to the other layouts."""

import random

import pytest
import torch

from models.errors import ConfigurationError
from workers.trainers.batch import TrainingBatch, documents_of, rows_of
from workers.trainers.document_attention import PaddedRows, use_document_attention
from workers.trainers.documents import (
    Document,
    collate_documents,
    greedy_packs,
    leveled_packs,
)
from workers.trainers.local import LocalTrainer
from workers.trainers.logprobs import Scorer
from workers.trainers.loss import LossSettings
from workers.trainers.normalization import Normalization
from workers.trainers.packing import Response, Row, collate, micro_batches
from workers.trainers.ranks import SingleRank
from workers.trainers.step_event import packing_event
from workers.trainers.step_loss import StepLoss, UpdateTokens
from workers.trainers.tally import UpdateTally
from workers.trainers.update_scores import StepWork


def test_packs_are_greedy_and_consecutive():
    assert greedy_packs([5, 3, 2, 6, 1], 8) == [[0, 1], [2, 3], [4]]
    assert greedy_packs([8, 8], 8) == [[0], [1]]
    assert greedy_packs([], 8) == []


def test_a_document_longer_than_the_budget_is_refused_with_the_needed_value():
    with pytest.raises(ConfigurationError, match=r"of 9 .* raise it to at least 9"):
        greedy_packs([1, 9], 8)


def test_no_greedy_pack_could_have_taken_the_next_document():
    rng = random.Random(4)
    for _ in range(200):
        lengths = [rng.randrange(1, 20) for _ in range(rng.randrange(0, 30))]
        packs = greedy_packs(lengths, 20)
        assert [i for pack in packs for i in pack] == list(range(len(lengths)))
        used = [sum(lengths[i] for i in pack) for pack in packs]
        assert all(0 < total <= 20 for total in used)
        for total, following in zip(used, packs[1:], strict=False):
            assert total + lengths[following[0]] > 20


@pytest.mark.parametrize(
    ("packs", "count", "expected"),
    [
        ([[0, 1], [2, 3], [4]], 3, [[0, 1], [2, 3], [4]]),
        ([[0, 1], [2, 3, 4]], 3, [[0, 1], [2, 3], [4]]),
        ([[0, 1, 2, 3]], 4, [[0], [1], [2], [3]]),
        ([[0, 1]], 5, [[0], [1]]),
        ([], 2, []),
    ],
)
def test_packs_are_leveled_by_halving_the_largest(packs, count, expected):
    assert leveled_packs(packs, count) == expected


PAIR = (Document([10, 11], [20, 21, 22], 0), Document([30], [40, 41], 3))


def test_layout_feeds_every_token_and_restarts_positions():
    batch = collate_documents(PAIR)
    assert batch.input_ids.tolist() == [[10, 11, 20, 21, 22, 30, 40, 41]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.segments.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert batch.predictors.tolist() == [1, 2, 3, 5, 6]
    assert batch.targets.tolist() == [20, 21, 22, 40, 41]
    assert batch.token_index.tolist() == [0, 1, 2, 3, 4]
    assert batch.num_model_tokens == batch.num_input_tokens == 8


def test_documents_do_not_see_each_other():
    open_to = collate_documents(PAIR).attention_bias(torch.float32)[0, 0] == 0
    own = torch.block_diag(torch.ones(5, 5).tril(), torch.ones(3, 3).tril())
    assert torch.equal(open_to, own.bool())


def test_the_packing_event_has_tokens_over_packs_times_budget():
    documents = [Document([1], [1] * (n - 1), 0) for n in (5, 3, 2, 6, 2)]
    packs = greedy_packs([d.num_tokens for d in documents], 8)
    micros = [collate_documents([documents[i] for i in pack]) for pack in packs]
    members = tuple(range(5))
    event = packing_event(StepWork(members, members, micros), 8, step=4, rollout_id=3)
    assert event["fill_fraction"] == 18 / 24
    assert (event["packs"], event["model_tokens"], event["max_pack_tokens"]) == (3, 18, 8)


def lay_out(kind, batch):
    """The whole batch in micro-batches of each kind."""
    members = range(len(batch.samples))
    if kind == "shared_prompt":
        return micro_batches(rows_of(batch, members), 32)
    if kind == "padded":
        samples = batch.samples
        return [
            collate([Row(s.prompt_ids, (Response(s.response_ids, s.offset),)) for s in samples])
        ]
    documents = documents_of(batch, members)
    packs = greedy_packs([d.num_tokens for d in documents], 32)
    assert len(packs) > 2
    assert max(map(len, packs)) > 1
    return [collate_documents([documents[i] for i in pack]) for pack in packs]


def loss_and_gradients(model, batch, micros, dtype):
    """Of the trainer's loss with an entropy bonus, the mean over responses."""
    tokens = UpdateTokens.of(batch, torch.device("cpu"), dtype)
    members = range(len(batch.samples))
    model_tokens = sum(micro.num_model_tokens for micro in micros)
    counts = Normalization.of(batch, members, members, model_tokens, SingleRank())
    section = type("Section", (), {"loss_aggregation": "response"})
    settings = LossSettings(use_tis=True, entropy_coef=0.02)
    loss = StepLoss(tokens, counts.weights(batch, section), settings, UpdateTally())
    scorer = Scorer.of(model, 0.9, 7, dtype)
    model.zero_grad(set_to_none=True)
    for micro in micros:
        scorer.backward(micro, loss)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return loss.finish()[0], gradients


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("other", ["shared_prompt", "padded"])
def test_loss_and_gradients_equal_those_of_other_layouts(
    make_model, make_mixture, make_groups, attention, family, other
):
    model = (make_mixture(family) if family == "qwen3_moe" else make_model(family)).double()
    model.set_attn_implementation(attention)
    batch = TrainingBatch.of(make_groups(num_groups=3))
    total, found = loss_and_gradients(model, batch, lay_out("documents", batch), torch.float64)
    expected, gradients = loss_and_gradients(model, batch, lay_out(other, batch), torch.float64)
    assert total == pytest.approx(expected, abs=2e-7)
    assert max(float(g.abs().max()) for g in found.values()) > 1e-2
    for name, gradient in gradients.items():
        assert (found[name] - gradient).abs().max() <= 2e-7, name


def test_float32_log_probs_equal_those_of_other_layouts(make_model, make_groups):
    model = make_model("qwen3")
    batch = TrainingBatch.of(make_groups(num_groups=3))
    scorer = Scorer.of(model, 1.0, 16, torch.float32)
    scored = {}
    for kind in ("documents", "shared_prompt", "padded"):
        scored[kind] = torch.full((batch.num_tokens,), float("nan"))
        for micro in lay_out(kind, batch):
            scored[kind][micro.token_index] = scorer.score(micro)[0]
    for kind in ("shared_prompt", "padded"):
        assert (scored["documents"] - scored[kind]).abs().max() <= 4e-6


def test_blocks_hold_every_token_once_and_little_padding():
    rng = random.Random(1)
    for _ in range(50):
        lengths = [rng.choice([1, 2, 7, 8, 9, 30, 200]) for _ in range(rng.randrange(1, 12))]
        blocks = PaddedRows.of(lengths, torch.device("cpu"))
        flat = torch.cat([rows.flatten() for rows in blocks.rows])
        assert torch.equal(flat[blocks.order], torch.arange(sum(lengths)))
        assert len(flat) < 2 * sum(lengths)
        starts = {sum(lengths[:i]): length for i, length in enumerate(lengths)}
        for rows in blocks.rows:
            for row in rows.tolist():
                length = starts[row[0]]
                padding = [row[0]] * (len(row) - length)
                assert row == [*range(row[0], row[0] + length), *padding]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "olmoe"])
def test_attention_within_documents_equals_a_mask(
    make_model, make_mixture, make_groups, attention, family
):
    """Loss and gradients; and a plain forward of one sequence stays what it was."""
    make = make_model if family in ("llama", "qwen3") else make_mixture
    model = make(family).double()
    model.set_attn_implementation(attention)
    batch = TrainingBatch.of(make_groups(num_groups=3))
    micros = lay_out("documents", batch)
    ids = micros[0].input_ids
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
    expected, gradients = loss_and_gradients(model, batch, micros, torch.float64)
    use_document_attention(model)
    use_document_attention(model)
    total, found = loss_and_gradients(model, batch, micros, torch.float64)
    assert total == pytest.approx(expected, abs=2e-7)
    for name, gradient in gradients.items():
        assert (found[name] - gradient).abs().max() <= 2e-7, name
    with torch.no_grad():
        assert (model(input_ids=ids, use_cache=False).logits - plain).abs().max() <= 1e-12


def test_the_trainer_takes_the_same_step_in_both_layouts(
    make_spec, make_groups, model_dir, tmp_path
):
    found = {}
    for packing in ("shared_prompt", "documents"):
        root = {"root": str(tmp_path / packing)}
        training = {"kl_loss_coef": 0.1}
        spec = make_spec(trainer={"packing": packing}, output=root, training=training)
        trainer = LocalTrainer(spec, model_dir)
        trainer.optimize(0, "a", make_groups())
        found[packing] = trainer.optimize(1, "b", make_groups(1)).metrics
    assert found["documents"]["train/kl_loss"] != 0
    for key in ("train/loss", "train/grad_norm", "train/kl_loss", "train/ppo_kl"):
        assert found["documents"][key] == pytest.approx(found["shared_prompt"][key], rel=1e-3), key
