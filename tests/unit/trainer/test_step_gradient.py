"""Loss and gradient of an optimizer step against plain autograd on padded full logits, in float64.

The reference computes every sequence in one padded batch with the model's own forward, writes each
formula out, and lets autograd differentiate it. What is tested computes packed or padded rows in
several micro-batches, differentiates the head by hand and normalizes by counts.
"""

import itertools

import pytest
import torch
from step_reference import Reference, chunks, gradients, layout, spread

from workers.trainers.batch import TrainingBatch, documents_of, plan_steps
from workers.trainers.document_attention import use_document_attention
from workers.trainers.documents import collate_documents
from workers.trainers.logprobs import Scorer
from workers.trainers.loss import LossSettings
from workers.trainers.normalization import Normalization
from workers.trainers.ranks import SingleRank
from workers.trainers.step_loss import StepLoss, UpdateTokens
from workers.trainers.tally import UpdateTally

TOLERANCE = 2e-7
CPU = torch.device("cpu")


def compute(model, batch, micros, settings, aggregation, old, frozen, temperature=1.0):
    """Loss and gradients as the trainer computes them."""
    scorer = Scorer.of(model, temperature, 5, torch.float64)
    tokens = UpdateTokens.of(batch, CPU, torch.float64)
    tokens.old = tokens.old if old is None else old.clone()
    if frozen is not None:
        reference = Scorer.of(frozen, temperature, 7, torch.float64)
        for micro in micros:
            tokens.reference[micro.token_index] = reference.score(micro)[0]
    members = range(len(batch.samples))
    model_tokens = sum(micro.num_model_tokens for micro in micros)
    counts = Normalization.of(batch, members, members, model_tokens, SingleRank())
    section = type("Section", (), {"loss_aggregation": aggregation})
    loss = StepLoss(tokens, counts.weights(batch, section), settings, UpdateTally())
    model.zero_grad(set_to_none=True)
    for micro in micros:
        scorer.backward(micro, loss, loss.look if loss.needs_look else None)
    return loss.finish()[0], gradients(model)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= TOLERANCE, name


@pytest.fixture
def setting(make_model, make_groups):
    """Model, frozen model, groups of 2 x 4 samples with lengths 1..8, log-probs before the update.

    The last are off the model's own, so that ratios, clips and weights all matter.
    """
    model, frozen = make_model("qwen3").double(), make_model("qwen3").double()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in frozen.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.05 * noise)
    groups = spread(make_groups())
    batch = TrainingBatch.of(groups)
    reference = Reference(groups, model)
    with torch.no_grad():
        own = reference.score(model)[0][reference.mask]
    noise = torch.randn(len(own), generator=generator, dtype=torch.float64)
    return model, frozen, groups, batch, own + 0.3 * noise


@pytest.mark.parametrize("aggregation", ["response", "token"])
@pytest.mark.parametrize("extra", [{}, {"entropy_coef": 0.02, "kl_coef": 0.03, "kl_type": "k3"}])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("standalone", [True, False])
def test_loss_and_gradient_equal_the_reference(
    setting, aggregation, extra, count, packed, standalone
):
    model, frozen, groups, batch, old = setting
    settings = LossSettings(use_tis=True, **extra)
    frozen = frozen if settings.kl_coef else None
    old = old if standalone else None
    micros = [layout(batch, part, packed) for part in chunks(range(8), count)]
    total, found = compute(model, batch, micros, settings, aggregation, old, frozen)
    model.zero_grad(set_to_none=True)
    # behavior log-probs are float32 in a batch
    reference = Reference(groups, model)
    reference.behavior = reference.padded(batch.behavior.double())
    reference.advantages = reference.advantages.float().double()
    expected = reference.loss(settings, aggregation, old, frozen)
    expected.backward()
    assert total == pytest.approx(float(expected.detach()), abs=TOLERANCE)
    assert_equal(found, gradients(model))
    assert max(float(g.abs().max()) for g in found.values()) > 1e-2


@pytest.mark.parametrize("aggregation", ["response", "token"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("standalone", [True, False])
@pytest.mark.parametrize("tis", [True, False])
def test_a_sequence_ratio_equals_the_reference(setting, aggregation, count, standalone, tis):
    model, _, groups, batch, old = setting
    settings = LossSettings(use_tis=tis, sequence_ratio=True, eps_clip=0.05, eps_clip_high=0.06)
    old = old if standalone else None
    micros = [layout(batch, part, True) for part in chunks(range(8), count)]
    total, found = compute(model, batch, micros, settings, aggregation, old, None)
    model.zero_grad(set_to_none=True)
    reference = Reference(groups, model)
    reference.behavior = reference.padded(batch.behavior.double())
    reference.advantages = reference.advantages.float().double()
    expected = reference.loss(settings, aggregation, old, None)
    expected.backward()
    assert total == pytest.approx(float(expected.detach()), abs=TOLERANCE)
    assert_equal(found, gradients(model))


@pytest.mark.parametrize("aggregation", ["response", "token"])
@pytest.mark.parametrize("sequence", [True, False])
def test_masked_tokens_have_no_part_in_it(setting, aggregation, sequence):
    """Whatever their log-probs are; a response without any active token counts as a sample."""
    model, frozen, groups, _, _ = setting
    masks = {1: [0, 1], 3: [1, 0, 0, 1], 5: [0] * 6, 7: [1] * 7 + [0]}
    for index, mask in masks.items():
        sample = groups[index // 4].samples[index % 4]
        sample.loss_mask = mask
        sample.logprobs = [
            x if keep else float("nan") for x, keep in zip(sample.logprobs, mask, strict=True)
        ]
    batch = TrainingBatch.of(groups)
    assert batch.active_counts.tolist() == [1, 1, 3, 2, 5, 0, 7, 7]
    extra = {"entropy_coef": 0.02, "kl_coef": 0.03, "kl_type": "k3"}
    settings = LossSettings(use_tis=True, sequence_ratio=sequence, **extra)
    micros = [layout(batch, part, True) for part in chunks(range(8), 2)]
    total, found = compute(model, batch, micros, settings, aggregation, None, frozen)
    model.zero_grad(set_to_none=True)
    reference = Reference(groups, model)
    reference.behavior = reference.padded(batch.behavior.double().nan_to_num(0.0))
    reference.advantages = reference.advantages.float().double()
    expected = reference.loss(settings, aggregation, None, frozen)
    expected.backward()
    assert total == pytest.approx(float(expected.detach()), abs=TOLERANCE)
    assert_equal(found, gradients(model))


def test_a_temperature_divides_the_logits_of_loss_and_reference(setting):
    model, frozen, groups, batch, old = setting
    settings = LossSettings(use_tis=True, kl_coef=0.03, kl_type="k3", entropy_coef=0.02)
    micros = [layout(batch, range(8), True)]
    total, found = compute(model, batch, micros, settings, "token", old, frozen, 0.7)
    model.zero_grad(set_to_none=True)
    reference = Reference(groups, model)
    reference.behavior = reference.padded(batch.behavior.double())
    reference.advantages = reference.advantages.float().double()
    expected = reference.loss(settings, "token", old, frozen, 0.7)
    expected.backward()
    assert total == pytest.approx(float(expected.detach()), abs=TOLERANCE)
    assert_equal(found, gradients(model))


@pytest.mark.parametrize("aggregation", ["response", "token"])
@pytest.mark.parametrize("packed", [True, False])
def test_every_split_into_micro_batches_gives_one_gradient(setting, aggregation, packed):
    """Lengths 1..8: all 128 ways to cut them into consecutive micro-batches.

    A gradient accumulates, so a split's is the sum over its micro-batches.
    """
    model, _, _, batch, old = setting
    settings = LossSettings(use_tis=True, entropy_coef=0.02)
    parts = {}
    for begin, end in itertools.combinations(range(9), 2):
        micro = layout(batch, range(begin, end), packed)
        _, found = compute(model, batch, [micro], settings, aggregation, old, None)
        parts[begin, end] = torch.cat([g.flatten() for g in found.values()])
    whole = parts[0, 8]
    splits = 0
    for cuts in itertools.chain.from_iterable(
        itertools.combinations(range(1, 8), size) for size in range(8)
    ):
        edges = [0, *cuts, 8]
        total = sum(parts[pair] for pair in itertools.pairwise(edges))
        assert (total - whole).abs().max() <= 1e-6
        splits += 1
    assert splits == 128


@pytest.mark.parametrize("aggregation", ["response", "token"])
def test_a_tied_group_may_be_left_out_of_the_model(setting, make_groups, aggregation):
    """It still counts in the denominators."""
    model = setting[0]
    mixed = [[0.75, -0.25, -0.25, -0.25], [0.0] * 4, [0.5, 0.5, -0.5, -0.5]]
    batch = TrainingBatch.of(spread(make_groups(num_groups=3, advantages=mixed)))
    (plan,) = plan_steps(batch, 1, 0, keep_tied=False)
    assert plan.active == (0, 1, 2, 3, 8, 9, 10, 11)
    settings = LossSettings(use_tis=True)
    everything = [layout(batch, plan.members, True)]
    _, with_it = compute(model, batch, everything, settings, aggregation, None, None)
    without = [layout(batch, plan.active, True)]
    _, left_out = compute(model, batch, without, settings, aggregation, None, None)
    for name, gradient in with_it.items():
        assert (left_out[name] - gradient).abs().max() <= 1e-6


@pytest.mark.parametrize("laid_out", ["shared", "padded", "documents"])
def test_positions_that_predict_no_active_token_have_no_gradient(setting, laid_out):
    """Of prompts but their last token, before masked tokens, of last tokens and of padding."""
    model, frozen, groups, _, _ = setting
    groups[1].samples[3].loss_mask = [1, 0, 0, 1, 1, 0, 1, 0]
    groups[0].samples[2].loss_mask = [0, 0, 0]
    batch = TrainingBatch.of(groups)
    if laid_out == "documents":
        use_document_attention(model)
        use_document_attention(frozen)
        micro = collate_documents(documents_of(batch, range(8)))
    else:
        micro = layout(batch, range(8), laid_out == "shared")
    bodies = []

    def keep(_module, _inputs, output):
        if output.requires_grad:
            output.retain_grad()
            bodies.append(output)

    model.model.norm.register_forward_hook(keep)
    settings = LossSettings(use_tis=True, entropy_coef=0.02, kl_coef=0.03, kl_type="k3")
    compute(model, batch, [micro], settings, "response", None, frozen)
    (body,) = bodies
    size = body.grad.flatten(0, 1).abs().amax(-1)
    active = batch.active[micro.token_index]
    # the shared last token of a prompt predicts the first token of every sibling
    predicting = set(micro.predictors[active].tolist())
    others = [place for place in range(len(size)) if place not in predicting]
    assert size[sorted(predicting)].min() > 0
    assert size[others].max() == 0
    assert len(others) > len(predicting)
