"""Auxiliary losses of routers: worked values, transformers, and plain autograd in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from router_reference import Layer, plain_layers, plain_losses
from step_reference import Reference, chunks, gradients, layout, spread
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from models.errors import ConfigurationError, ContractViolation, NonFiniteLoss
from workers.trainers.batch import TrainingBatch, documents_of
from workers.trainers.decoder_layers import recompute_layers
from workers.trainers.document_attention import use_document_attention
from workers.trainers.documents import collate_documents
from workers.trainers.logprobs import Scorer
from workers.trainers.loss import LossSettings
from workers.trainers.normalization import Normalization
from workers.trainers.ranks import SingleRank
from workers.trainers.router_losses import Routed, RouterLosses, RouterObjective
from workers.trainers.routers import find_routers
from workers.trainers.routing import Routing
from workers.trainers.step_loss import StepLoss, UpdateTokens
from workers.trainers.tally import UpdateTally

TOLERANCE = 2e-7
EXPERTS, TOP_K = 5, 2
CHOICES = [
    {"grouping": grouping, "reduction": reduction, "z_reduction": z_reduction}
    for grouping, reduction, z_reduction in itertools.product(
        ("pack", "sequence"), ("token", "response"), ("token", "response")
    )
]


def losses_of(layers, lengths, tokens, documents, **choice):
    """Both losses of one forward with weight 1 each, and their sum with its graph."""
    losses = RouterLosses(RouterObjective(1.0, 1.0, **choice), tokens, documents)
    value = losses.of_pack(layers, lengths)
    return losses.finish(), value


def test_worked_values_of_two_documents():
    """Two tokens to expert 0 and six to expert 1, each with probability a of two experts."""
    logits = torch.tensor([[2.0, 0.0]] * 2 + [[0.0, 2.0]] * 6, dtype=torch.float64)
    layer = Routed(logits, logits.argmax(-1, keepdim=True))
    a = 1 / (1 + math.exp(-2))
    together = 2 * (0.25 * (2 * a + 6 * (1 - a)) + 0.75 * (2 * (1 - a) + 6 * a)) / 8
    z = math.log(math.exp(2) + 1) ** 2
    for choice, expected in (
        ({"grouping": "pack"}, together),
        ({"grouping": "sequence"}, 2 * a),
        ({"grouping": "sequence", "reduction": "response"}, 2 * a),
        (
            {"grouping": "pack", "reduction": "response"},
            0.5 * 2 * (0.25 * a + 0.75 * (1 - a)) + 0.5 * 2 * (0.25 * (1 - a) + 0.75 * a),
        ),
    ):
        found, _ = losses_of([layer], [2, 6], 8, 2, **choice)
        assert found.load_balancing == pytest.approx(expected, abs=1e-14)
        assert found.router_z == pytest.approx(z, abs=1e-14)


def test_a_reduction_weighs_documents():
    """Documents of 2 and 6 tokens; z-losses of 1 and 3 a token."""
    one, three = (math.sqrt(x) - math.log(2) for x in (1, 3))
    logits = torch.tensor([[one] * 2] * 2 + [[three] * 2] * 6, dtype=torch.float64)
    layer = Routed(logits, torch.tensor([[0]] * 8))
    for reduction, expected in (("token", 2.5), ("response", 2.0)):
        found, _ = losses_of([layer], [2, 6], 8, 2, z_reduction=reduction)
        assert found.router_z == pytest.approx(expected, abs=1e-14)


def test_an_even_layer_has_load_balancing_one_and_layers_add_up():
    logits = torch.zeros(6, 3, dtype=torch.float64)
    layer = Routed(logits, torch.tensor([[0, 1], [1, 2], [2, 0]] * 2))
    found, _ = losses_of([layer, layer], [4, 2], 6, 2)
    assert found.load_balancing == pytest.approx(2.0, abs=1e-14)
    assert found.router_z == pytest.approx(2 * math.log(3) ** 2, abs=1e-14)


def some_layers(lengths, seed):
    """Two layers of random logits with other experts than the routers' own."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(2):
        logits = torch.randn(sum(lengths), EXPERTS, generator=generator, dtype=torch.float64)
        chosen = torch.rand(sum(lengths), EXPERTS, generator=generator).topk(TOP_K).indices
        layers.append(Routed(logits.requires_grad_(), chosen))
    return layers


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("count_source", ["executed", "router_selected"])
def test_loss_and_gradient_equal_those_by_hand(choice, count_source):
    """Gradient at a token's logits: E w p (f - sum f p), and 2 w logsumexp p."""
    lengths, tokens, documents = (2, 6, 3), 27, 7
    layers = some_layers(lengths, 39)
    found, value = losses_of(
        layers, lengths, tokens, documents, count_source=count_source, **choice
    )
    assert float(value.detach()) == pytest.approx(sum(found), abs=1e-12)
    value.backward()
    owner = [d for d, n in enumerate(lengths) for _ in range(n)]
    balance = z_loss = 0.0
    for logits, chosen in layers:
        ids = chosen.tolist()
        if count_source == "router_selected":
            ids = [sorted(range(EXPERTS), key=row.__getitem__)[-TOP_K:] for row in logits.tolist()]
        for token, row in enumerate(logits.detach()):
            whole = choice["grouping"] == "pack"
            same = [t for t in range(11) if whole or owner[t] == owner[token]]
            flat = [expert for t in same for expert in ids[t]]
            share = torch.tensor([flat.count(e) / len(flat) for e in range(EXPERTS)])
            p, top = torch.softmax(row, -1), float(torch.logsumexp(row, -1))
            by_document = documents * lengths[owner[token]]
            w = 1 / (tokens if choice["reduction"] == "token" else by_document)
            z_w = 1 / (tokens if choice["z_reduction"] == "token" else by_document)
            mean = float((share.double() * p).sum())
            balance += EXPERTS * w * mean
            z_loss += z_w * top**2
            expected = EXPERTS * w * p * (share.double() - mean) + 2 * z_w * top * p
            assert (logits.grad[token] - expected).abs().max() <= 1e-7
    assert found.load_balancing == pytest.approx(balance, abs=1e-7)
    assert found.router_z == pytest.approx(z_loss, abs=1e-12)


def test_documents_that_are_not_what_was_routed_are_refused():
    with pytest.raises(ContractViolation, match=r"saw \[11\] tokens, the documents .* have 10"):
        losses_of(some_layers((2, 6, 3), 0), (2, 8), 10, 2)


@pytest.mark.parametrize("place", [0, 1])
def test_a_loss_that_is_no_number_is_refused(place):
    layer = some_layers((3,), 1)[0]
    with torch.no_grad():
        layer.logits[1] = math.inf
    losses = RouterLosses(RouterObjective(1.0 - place, float(place)), 3, 1)
    losses.of_pack([layer], (3,))
    with pytest.raises(NonFiniteLoss, match=r"auxiliary losses of the routers are .*nan"):
        losses.finish()


def test_a_dense_model_has_none(make_spec, make_model):
    for key in ("router_aux_loss_weight", "router_z_loss_weight"):
        spec = make_spec(training={key: 0.1})
        with pytest.raises(ConfigurationError, match=f"{key}.*has no routers; remove the keys"):
            Routing.of(spec, make_model("qwen3"))


# the tiny mixture


def with_routes(groups, layers):
    """Give every sample random routes, as an engine that goes by other experts would."""
    generator = torch.Generator().manual_seed(11)
    for group in groups:
        for sample in group.samples:
            fed = len(sample.prompt_token_ids) + len(sample.response_token_ids) - 1
            routes = torch.rand(fed, layers, EXPERTS, generator=generator).topk(TOP_K).indices
            sample.routed_experts = np.ascontiguousarray(routes.numpy().astype("<i4")).tobytes()
    return groups


def packs_of(batch, parts):
    return [collate_documents(documents_of(batch, part)) for part in parts]


def trained(model, batch, micros, objective, *, replay=False, settings=None):
    """Loss parts and gradients of one step as the trainer computes them."""
    routing = Routing(find_routers(model), replay=replay, objective=objective)
    scorer = Scorer.of(model, 1.0, 5, torch.float64, routing)
    tokens = UpdateTokens.of(batch, torch.device("cpu"), torch.float64)
    members = range(len(batch.samples))
    fed = sum(micro.num_model_tokens for micro in micros)
    counts = Normalization.of(batch, members, members, fed, SingleRank())
    section = type("Section", (), {"loss_aggregation": "response"})
    weights = counts.weights(batch, section)
    loss = StepLoss(tokens, weights, settings or LossSettings(use_tis=True), UpdateTally())
    model.zero_grad(set_to_none=True)
    routing.begin_step(counts.model_tokens, counts.documents)
    for micro in micros:
        scorer.backward(micro, loss)
    return routing.losses.finish(), loss.finish()[0], gradients(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_one_pack_has_the_load_balancing_of_transformers(make_mixture, make_groups, family):
    """Layer by layer: theirs pools layers, and counts k shares for a token."""
    model = make_mixture(family).double()
    batch = TrainingBatch.of(make_groups())
    (micro,) = packs_of(batch, [range(8)])
    expected = 0.0
    for layer in plain_layers(model, batch, range(8)):
        theirs = load_balancing_loss_func((torch.cat(layer.logits),), EXPERTS, TOP_K)
        expected += float(theirs.detach()) / TOP_K
    found, _, _ = trained(model, batch, [micro], RouterObjective(load_balancing_weight=1.0))
    assert found.load_balancing == pytest.approx(expected, abs=1e-6)  # theirs is in float32
    assert found.router_z == 0.0


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("count", "recompute"), [(1, False), (4, False), (2, True)])
def test_a_step_equals_plain_autograd(make_mixture, make_groups, choice, count, recompute):
    """Policy gradient, entropy and both auxiliary losses, in any number of micro-batches."""
    model = make_mixture("qwen3_moe").double()
    model.set_attn_implementation("eager")
    groups = spread(make_groups())
    batch = TrainingBatch.of(groups)
    objective = RouterObjective(0.3, 0.02, **choice)
    settings = LossSettings(use_tis=True, entropy_coef=0.02)
    parts = chunks(range(8), count)
    reference = Reference(groups, model)
    reference.behavior = reference.padded(batch.behavior.double())
    reference.advantages = reference.advantages.float().double()
    policy = reference.loss(settings, "response", None, None)
    balance, z = plain_losses(plain_layers(model, batch, range(8)), parts, objective, TOP_K)
    (policy + balance + z).backward()
    expected = gradients(model)
    if recompute:
        recompute_layers(model)
    use_document_attention(model)
    found, total, own = trained(model, batch, packs_of(batch, parts), objective, settings=settings)
    assert total == pytest.approx(float(policy.detach()), abs=TOLERANCE)
    assert found.load_balancing == pytest.approx(float(balance.detach()), abs=TOLERANCE)
    assert found.router_z == pytest.approx(float(z.detach()), abs=TOLERANCE)
    for name, gradient in expected.items():
        assert (own[name] - gradient).abs().max() <= TOLERANCE, name
    without = trained(model, batch, packs_of(batch, parts), RouterObjective(), settings=settings)
    assert without[0] == (0.0, 0.0)
    gate = "model.layers.2.mlp.gate.weight"
    assert (without[2][gate] - own[gate]).abs().max() > 1e-3


@pytest.mark.parametrize("count_source", ["executed", "router_selected"])
@pytest.mark.parametrize("grouping", ["pack", "sequence"])
def test_replayed_experts_are_counted_or_the_routers_own(
    make_mixture, make_groups, count_source, grouping
):
    model = make_mixture("olmoe").double()
    batch = TrainingBatch.of(with_routes(make_groups(), 3))
    objective = RouterObjective(1.0, 0.5, grouping=grouping, count_source=count_source)
    parts = chunks(range(8), 2)
    routing = Routing(find_routers(model), replay=True, objective=objective)
    layers = plain_layers(model, batch, range(8), replay=routing)
    if count_source == "router_selected":
        layers = [Layer(x.logits, [row.topk(TOP_K).indices for row in x.logits]) for x in layers]
    balance, z = plain_losses(layers, parts, objective, TOP_K)
    (balance + z).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert {name for name in expected if ".gate." in name}
    packs = packs_of(batch, parts)
    found, _, own = trained(model, batch, packs, objective, replay=True)
    _, _, without = trained(model, batch, packs, RouterObjective(), replay=True)
    assert found.load_balancing == pytest.approx(float(balance.detach()), abs=TOLERANCE)
    assert found.router_z == pytest.approx(float(z.detach()), abs=TOLERANCE)
    for name, gradient in own.items():
        share = expected.get(name, torch.zeros_like(gradient))
        assert (gradient - without[name] - share).abs().max() <= TOLERANCE, name


@pytest.mark.parametrize("reduction", ["token", "response"])
def test_sequences_do_not_depend_on_their_pack(make_mixture, make_groups, reduction):
    model = make_mixture("qwen3_moe").double()
    batch = TrainingBatch.of(make_groups())
    objective = RouterObjective(0.3, 0.02, "sequence", reduction, reduction)
    answers = [
        trained(model, batch, packs_of(batch, parts), objective)
        for parts in ([range(8)], [[3, 1], [7], [0, 2, 4, 5, 6]], [[i] for i in range(8)])
    ]
    for parts, total, found in answers[1:]:
        assert parts == pytest.approx(answers[0][0], abs=1e-12)
        assert total == pytest.approx(answers[0][1], abs=1e-12)
        for name, gradient in answers[0][2].items():
            assert (found[name] - gradient).abs().max() <= 1e-10, name


def test_a_pack_in_shared_rows_is_refused(make_mixture, make_groups):
    model = make_mixture("qwen3_moe").double()
    batch = TrainingBatch.of(make_groups())
    micros = [layout(batch, range(8), True)]
    with pytest.raises(ContractViolation, match="the documents of the pack have 0"):
        trained(model, batch, micros, RouterObjective(0.1))
