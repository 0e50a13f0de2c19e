"""Hooks on routers: what they count, and what replay makes of supplied routes."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from models.errors import ConfigurationError, ContractViolation
from workers.trainers.batch import TrainingBatch, documents_of
from workers.trainers.decoder_layers import recompute_layers
from workers.trainers.documents import collate_documents
from workers.trainers.logprobs import Scorer
from workers.trainers.replay_check import Phase
from workers.trainers.routers import find_routers
from workers.trainers.routing import Routing

FAMILIES = ["qwen3_moe", "olmoe"]
LAYERS = {"qwen3_moe": [0, 2], "olmoe": [0, 1, 2]}
EXPERTS, TOP_K = 5, 2


def own_routes(model, ids):
    """[tokens, layers, k] that a plain forward of one sequence chooses, by its router logits."""
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids]), output_router_logits=True, use_cache=False)
    return torch.stack([logits.topk(TOP_K, -1).indices for logits in out.router_logits], 1)


def supply(model, groups, change=lambda routes: routes):
    """Give every sample the routes that ``model`` would choose, after ``change``; without tails."""
    for group in groups:
        for sample in group.samples:
            routes = own_routes(model, sample.prompt_token_ids + sample.response_token_ids)
            routes = change(routes[:-1]).numpy().astype("<i4")
            sample.routed_experts = np.ascontiguousarray(routes).tobytes()
    return groups


def one_pack(groups):
    batch = TrainingBatch.of(groups)
    return batch, collate_documents(documents_of(batch, range(len(batch.samples))))


def scorer_of(model, routing, dtype=torch.float32):
    return Scorer.of(model, 1.0, 16, dtype, routing)


def total(new, _entropy, _index):
    return new.sum()


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_are_found_by_layer(make_mixture, family):
    routers = find_routers(make_mixture(family))
    assert [r.name for r in routers] == [f"model.layers.{i}.mlp.gate" for i in LAYERS[family]]
    assert {(r.num_experts, r.top_k) for r in routers} == {(EXPERTS, TOP_K)}
    assert {r.normalizes for r in routers} == {family == "qwen3_moe"}


def test_a_dense_model_has_no_routers(make_model):
    assert find_routers(make_model("qwen3")) == ()


def test_a_router_of_another_rule_is_refused(make_mixture):
    model = make_mixture("qwen3_moe")
    module = model.model.layers[2].mlp.gate
    module.register_forward_hook(lambda _m, _i, out: (out[0], out[1] * 2.5, out[2]))
    with pytest.raises(ConfigurationError, match=r"model\.layers\.2\.mlp\.gate weighs experts"):
        find_routers(model)


def test_routers_of_different_sizes_are_refused(make_mixture):
    model = make_mixture("olmoe")
    model.model.layers[1].mlp.gate.top_k = 3
    with pytest.raises(ConfigurationError, match=r"\[\(5, 2\), \(5, 3\)\]"):
        find_routers(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True])
def test_every_token_of_a_training_forward_counts_once(
    make_mixture, make_groups, family, recompute
):
    model = make_mixture(family)
    batch, pack = one_pack(make_groups())
    expected = torch.zeros(len(LAYERS[family]), EXPERTS, dtype=torch.long)
    for sample in batch.samples:
        routes = own_routes(model, sample.prompt_ids + sample.response_ids)
        for layer in range(len(expected)):
            expected[layer] += routes[:, layer].flatten().bincount(minlength=EXPERTS)
    if recompute:
        model.train()
        recompute_layers(model)
    routing = Routing(find_routers(model))
    scorer = scorer_of(model, routing)
    scorer.score(pack)
    model(input_ids=pack.input_ids, use_cache=False)
    assert routing.counts().sum() == 0
    scorer.backward(pack, total)
    taken = routing.counts()
    assert torch.equal(taken, expected[None])
    assert (taken.sum(-1) == TOP_K * pack.num_model_tokens).all()
    scorer.backward(pack, total)
    assert torch.equal(taken, expected[None]), "a copy"
    assert torch.equal(routing.counts(), torch.stack([expected, expected]))
    routing.begin_step(1, 1)
    assert routing.counts().shape == (0, len(expected), EXPERTS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True])
def test_replay_of_the_routers_own_choice_changes_nothing(
    make_mixture, make_groups, family, recompute
):
    """The order of a token's experts is the engine's; the tail's experts touch no log-prob."""
    model = make_mixture(family)
    groups = supply(model, make_groups(), lambda routes: routes.flip(-1))
    _, pack = one_pack(groups)
    plain = scorer_of(model, Routing())
    expected, _ = plain.score(pack)
    plain.backward(pack, total)
    expected_gradients = gradients(model)
    if recompute:
        model.train()
        recompute_layers(model)
    routing = Routing(find_routers(model), replay=True, check=True)
    scorer = scorer_of(model, routing)
    replayed, _ = scorer.score(pack)
    assert (replayed - expected).abs().max() <= 1e-6
    assert routing.counts().sum() == 0
    routing.check.reset()
    scorer.backward(pack, total)
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradient, expected_gradients[name], atol=2e-5, rtol=1e-4), name
    event = routing.check.event(Phase.TRAINING, 7)
    routing.check.refuse_mismatch(Phase.TRAINING)
    layer = {"entered": 1 + recompute, "returned": 1 + recompute, "grad_enabled": 1 + recompute}
    assert event == {
        "rollout_id": 7,
        "phase": "training",
        "tokens": pack.num_model_tokens,
        "captured_tokens": pack.num_model_tokens - 8,
        "synthetic_tail_tokens": 8,
        "samples": 8,
        "mismatches": 0,
        "layers": dict.fromkeys(routing.names, layer),
    }
    tails = 8
    assert (routing.counts().sum(-1) == TOP_K * pack.num_model_tokens).all()
    assert (routing.counts()[..., :TOP_K] >= tails).all()


def mixture_by_hand(block, hidden, chosen, normalizes):
    """Output [T, H] of a block that sends tokens to ``chosen`` [T, k], by its formula."""
    p = torch.softmax(hidden @ block.gate.weight.T, -1)
    weights = torch.stack([p[t, chosen[t]] for t in range(len(hidden))])
    if normalizes:
        weights = weights / weights.sum(1, keepdim=True)
    rows = []
    for token, experts in enumerate(chosen.tolist()):
        row = torch.zeros_like(hidden[token])
        for place, expert in enumerate(experts):
            gate, up = (block.experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
            answer = block.experts.down_proj[expert] @ (functional.silu(gate) * up)
            row = row + weights[token, place] * answer
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_experts_get_the_routers_own_weights_and_gradient(make_mixture, make_groups, family):
    model = make_mixture(family)
    groups = supply(model, make_groups(), lambda routes: (routes + 2) % EXPERTS)
    _, pack = one_pack(groups)
    routing = Routing(find_routers(model), replay=True)
    block = model.model.layers[2].mlp
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, pack.num_model_tokens, 32, generator=generator)
    with routing.micro_batch(pack, Phase.TRAINING):
        found = block(hidden)[0]
        found.square().sum().backward()
    replayed = gradients(block)
    chosen = torch.from_numpy(
        np.concatenate(
            [
                part
                for table in pack.route_tables
                for part in (
                    np.frombuffer(table, np.int32).reshape(-1, len(routing.names), TOP_K)[:, -1],
                    [[0, 1]],
                )
            ]
        )
    )
    expected = mixture_by_hand(block, hidden[0], chosen, family == "qwen3_moe")
    expected.square().sum().backward()
    assert torch.allclose(found, expected, atol=1e-6, rtol=1e-5)
    for name, gradient in gradients(block).items():
        assert torch.allclose(replayed[name], gradient, atol=1e-5, rtol=1e-4), name
    assert replayed["gate.weight"].abs().max() > 1e-3
    assert torch.equal(routing.counts()[0, -1], chosen.flatten().bincount(minlength=EXPERTS))


def test_replay_decides_the_log_probs(make_mixture, make_groups):
    model = make_mixture("olmoe")
    groups = supply(model, make_groups(), lambda routes: (routes + 1) % EXPERTS)
    _, pack = one_pack(groups)
    own, _ = scorer_of(model, Routing()).score(pack)
    scorer = scorer_of(model, Routing(find_routers(model), replay=True))
    replayed, _ = scorer.score(pack)
    by_logits = torch.full_like(own, float("nan"))
    for logits, targets, index in scorer.logits(pack):
        by_logits[index] = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    assert (replayed - own).abs().max() > 1e-2
    assert (replayed - by_logits).abs().max() <= 1e-5


def test_a_micro_batch_without_all_its_routes_is_refused(make_mixture, make_groups):
    model = make_mixture("olmoe")
    groups = supply(model, make_groups())
    groups[1].samples[2].routed_experts = None
    _, pack = one_pack(groups)
    scorer = scorer_of(model, Routing(find_routers(model), replay=True))
    with pytest.raises(ContractViolation, match=r"micro-batch of \d+ tokens has expert routes for"):
        scorer.score(pack)


def lie(_module, inputs):
    """Send the fourth token somewhere else behind the router's back."""
    hidden, chosen, weights = inputs
    chosen = chosen.clone()
    chosen[3] = (chosen[3] + 1) % EXPERTS
    return hidden, chosen, weights


@pytest.mark.parametrize("phase", [Phase.SCORING, Phase.TRAINING])
def test_diagnostics_see_a_layer_that_goes_elsewhere(make_mixture, make_groups, phase):
    model = make_mixture("qwen3_moe")
    _, pack = one_pack(supply(model, make_groups()))
    routing = Routing(find_routers(model), replay=True, check=True)
    model.model.layers[2].mlp.experts.register_forward_pre_hook(lie, prepend=True)
    scorer = scorer_of(model, routing)
    if phase is Phase.SCORING:
        scorer.score(pack)
    else:
        scorer.backward(pack, total)
    assert routing.check.event(phase, 0)["mismatches"] == 1
    with pytest.raises(
        ContractViolation, match=rf"{phase}, layer model\.layers\.2\.mlp\.gate: 1 tokens were sent"
    ):
        routing.check.refuse_mismatch(phase)


def test_diagnostics_see_a_layer_that_was_not_entered(make_mixture, make_groups):
    model = make_mixture("qwen3_moe")
    _, pack = one_pack(supply(model, make_groups()))
    routing = Routing(find_routers(model), replay=True, check=True)
    layer = model.model.layers[2]
    layer.mlp = torch.nn.Identity()
    scorer_of(model, routing).score(pack)
    with pytest.raises(ContractViolation, match="entered 0 times in 1 micro-batches"):
        routing.check.refuse_mismatch(Phase.SCORING)


def test_diagnostics_see_training_without_gradients(make_mixture, make_groups):
    model = make_mixture("qwen3_moe")
    _, pack = one_pack(supply(model, make_groups()))
    routing = Routing(find_routers(model), replay=True, check=True)
    scorer_of(model, routing).score(pack)
    with pytest.raises(ContractViolation, match="entered with gradients 0 times"):
        routing.check.refuse_mismatch(Phase.TRAINING)


@pytest.mark.parametrize("recompute", [True, False])
def test_diagnostics_see_layers_that_were_not_computed_again(make_mixture, make_groups, recompute):
    """With checkpointing every layer is entered twice; here a layer keeps what it should not."""
    model = make_mixture("qwen3_moe")
    _, pack = one_pack(supply(model, make_groups()))
    routing = Routing(find_routers(model), replay=True, check=True, recomputes=True)
    if recompute:
        recompute_layers(model)
    scorer_of(model, routing).backward(pack, total)
    if recompute:
        routing.check.refuse_mismatch(Phase.TRAINING)
        return
    with pytest.raises(ContractViolation, match="entered 1 times in 1 micro-batches that compute"):
        routing.check.refuse_mismatch(Phase.TRAINING)
    routing.check.refuse_mismatch(Phase.SCORING)
