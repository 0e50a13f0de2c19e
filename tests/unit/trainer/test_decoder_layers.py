"""Layers that are computed again, and layers that are compiled, beside layers as they are.

The gradients of layers as they are equal autograd's in float64: ``test_step_gradient``. Compiled
layers run here without generated code, with a kernel for documents in plain operations.
"""

import random

import pytest
import torch
from routed_groups import routed

from activities.storage import layout
from activities.storage.store import Store
from models.errors import ConfigurationError
from workers.trainers import document_attention
from workers.trainers.decoder_layers import compile_layers, recompute_layers
from workers.trainers.document_attention import use_document_attention
from workers.trainers.documents import Document, collate_documents
from workers.trainers.local import LocalTrainer
from workers.trainers.log_softmax import CompiledSoftmax, SlicedSoftmax
from workers.trainers.logprobs import Scorer
from workers.trainers.packing import Response, Row, collate
from workers.trainers.routers import find_routers
from workers.trainers.routing import Routing

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"  # tracing looks at it
)

RESPONSES = (3, 1, 5, 2, 7)
CPU = torch.device("cpu")


def prompt_and_responses():
    rng = random.Random(4)
    draw = lambda count: [rng.randrange(4, 100) for _ in range(count)]  # noqa: E731
    return draw(6), [draw(count) for count in RESPONSES]


def documents(count=5):
    prompt, responses = prompt_and_responses()
    offsets = [sum(RESPONSES[:i]) for i in range(count)]
    return [Document(prompt, responses[i], offsets[i]) for i in range(count)]


def shared_row():
    prompt, responses = prompt_and_responses()
    placed = [Response(r, sum(RESPONSES[:i])) for i, r in enumerate(responses)]
    return collate([Row(prompt, tuple(placed))])


def gradient(scorer, model, micro):
    """Log-probs and the gradient of a weighted sum of log-probs and entropies."""
    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1.0, 2.0, sum(RESPONSES), dtype=torch.float64)

    def loss(logprobs, entropies, index):
        return (weights[index] * (logprobs + 0.1 * entropies)).sum()

    logprobs, _ = scorer.score(micro)
    scorer.backward(micro, loss)
    return logprobs, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found, expected, tolerance=0.0):
    assert (found[0] - expected[0]).abs().max() <= tolerance
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        assert (found[1][name] - values).abs().max() <= tolerance, name


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("packed", [True, False])
def test_layers_that_are_computed_again_have_the_same_gradient(make_model, family, packed):
    def found(again):
        model = make_model(family).double()
        if packed:
            use_document_attention(model)
        if again:
            recompute_layers(model)
        micro = collate_documents(documents()) if packed else shared_row()
        return gradient(Scorer.of(model, 0.8, 4, torch.float64), model, micro)

    assert_same(found(True), found(False))


def test_a_layer_keeps_its_input_only(make_model):
    def kept(again):
        model = make_model("qwen3").double()
        if again:
            recompute_layers(model)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        seen = {}

        def note(tensor):
            if tensor.untyped_storage().data_ptr() not in own:
                seen[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        scorer = Scorer.of(model, 1.0, 64, torch.float64)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            hidden = scorer._hidden(shared_row())
        return sum(t.untyped_storage().nbytes() for t in seen.values()), hidden

    assert kept(True)[0] < kept(False)[0] / 5


def test_a_trainer_takes_the_same_updates_with_checkpointing(
    make_spec, make_groups, model_dir, tmp_path
):
    def trained(again):
        spec = make_spec(
            trainer={"activation_checkpointing": again},
            output={"root": str(tmp_path / str(again))},
        )
        trainer = LocalTrainer(spec, model_dir)
        for update in range(3):
            trainer.optimize(update, f"d{update}", make_groups(update))
        return trainer

    again, once = trained(True), trained(False)
    for (name, found), expected in zip(
        again.model.named_parameters(), once.model.parameters(), strict=True
    ):
        assert (found - expected).abs().max() <= 1e-6, name


def test_experts_that_are_computed_again_go_by_the_same_routes_and_count_once(
    make_spec, make_groups, mixture_dir, tmp_path
):
    def trained(again):
        spec = make_spec(
            trainer={"activation_checkpointing": again},
            training={"use_rollout_routing_replay": True},
            core={"replay_diagnostics": True, "scoring_pass_required": True},
            output={"root": str(tmp_path / str(again))},
        )
        trainer = LocalTrainer(spec, mixture_dir)
        trainer.optimize(0, "d0", routed(make_groups(), mixture_dir))
        rows, _ = Store(spec.output.root).read_jsonl(layout.training_contract(0))
        load = [row for row in rows if row["event"] == "router_load"]
        replays = [row for row in rows if row["event"] == "replay_routes"]
        return trainer, load, replays

    (again, load, replays), (once, expected_load, plain) = trained(True), trained(False)
    assert load == expected_load
    assert [row["mismatches"] for row in replays] == [0] * len(plain)
    entered = [sum(layer["entered"] for layer in row["layers"].values()) for row in replays]
    before = [sum(layer["entered"] for layer in row["layers"].values()) for row in plain]
    assert entered == [before[0], 2 * before[1]]  # scoring, training
    for found, expected in zip(again.model.parameters(), once.model.parameters(), strict=True):
        assert (found - expected).abs().max() <= 1e-6


def test_own_routes_are_counted_once(make_mixture):
    def counted(again):
        model = make_mixture("qwen3_moe").double()
        use_document_attention(model)
        if again:
            recompute_layers(model)
        routing = Routing(find_routers(model))
        scorer = Scorer.of(model, 1.0, 64, torch.float64, routing)
        found = gradient(scorer, model, collate_documents(documents()))
        return found, routing.counts()

    (found, counts), (expected, once) = counted(True), counted(False)
    assert torch.equal(counts, once)
    assert int(once.sum()) == 2 * 2 * (6 * len(RESPONSES) + sum(RESPONSES))
    assert_same(found, expected)


def attend_by_mask(query, key, value, bounds, scale, _kernel):
    """What the kernel computes, with every score of the pack under a mask."""
    places = torch.arange(query.shape[0])
    document = torch.searchsorted(bounds.offsets.long(), places, right=True)
    seen = (places[:, None] >= places) & (document[:, None] == document)
    group = query.shape[1] // key.shape[1]
    k, v = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (key, value))
    scores = query.transpose(0, 1) @ k.transpose(1, 2) * scale
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1)


@pytest.fixture
def compiled(make_model, monkeypatch):
    """A scorer with compiled layers, its model, and a list of what was compiled."""
    graphs = []
    monkeypatch.setattr(document_attention, "attend", attend_by_mask)
    torch._dynamo.reset()
    aot = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs, **options):
        graphs.append(graph)
        return aot(graph, inputs, **options)

    def make(family="qwen3", again=False):
        model = make_model(family).double()
        use_document_attention(model)
        compile_layers(model, backend)
        if again:
            recompute_layers(model)
        scorer = Scorer.of(model, 0.8, 4, torch.float64, longest_document=64)
        object.__setattr__(scorer, "softmax", CompiledSoftmax(0.8, "eager"))
        return scorer, model, graphs

    yield make
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("again", [True, False])
def test_compiled_layers_have_the_same_gradient(compiled, make_model, family, again):
    scorer, model, _ = compiled(family, again)
    plain = make_model(family).double()
    use_document_attention(plain)
    expected = Scorer.of(plain, 0.8, 4, torch.float64)
    micro = collate_documents(documents())
    found = gradient(scorer, model, micro)
    assert_same(found, gradient(expected, plain, micro), 1e-12)
    assert max(float(g.abs().max()) for g in found[1].values()) > 1e-2


def test_one_compilation_serves_every_layer_and_every_pack(compiled):
    scorer, model, graphs = compiled()
    for count in (5, 3, 4, 2, 1):
        gradient(scorer, model, collate_documents(documents(count)))
    assert len(graphs) == 1  # a scoring pass runs it too


def scored_and_trained(scorer, micro):
    """Log-probs by a scoring pass, and those that the loss is given."""
    seen = torch.full((sum(RESPONSES),), torch.nan, dtype=torch.float64)

    def loss(logprobs, entropies, index):
        seen[index] = logprobs.detach().double()
        return (logprobs + 0.1 * entropies).sum()

    logprobs, _ = scorer.score(micro)
    scorer.backward(micro, loss)
    return logprobs, seen[micro.token_index]


@pytest.mark.parametrize("again", [True, False])
def test_a_scoring_pass_runs_the_code_of_the_training_forward(compiled, again):
    scorer, _, graphs = compiled(again=again)
    for count in (5, 2):
        scored, trained = scored_and_trained(scorer, collate_documents(documents(count)))
        assert torch.equal(scored, trained)
        assert scored.grad_fn is None
    assert len(graphs) == 1


def test_a_reference_shares_what_was_compiled_for_the_policy(compiled):
    (policy, _, graphs), (reference, _, _) = compiled(), compiled()
    micro = collate_documents(documents())
    scored, _ = scored_and_trained(policy, micro)
    assert torch.equal(reference.score(micro)[0], scored)
    assert len(graphs) == 1


def test_without_documents_nothing_is_compiled(compiled):
    scorer, model, graphs = compiled()
    scorer.plain_logits(torch.arange(4, 12))
    gradient(scorer, model, shared_row())
    assert not graphs


def test_a_model_without_layers_is_refused(make_model):
    model = make_model("qwen3")
    model.base_model.layers = None
    with pytest.raises(ConfigurationError, match=r"trainer\.compile needs"):
        compile_layers(model)
    with pytest.raises(ConfigurationError, match=r"trainer\.activation_checkpointing needs"):
        recompute_layers(model)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_both_log_softmaxes_agree_with_autograd(temperature, with_entropy):
    torch.manual_seed(2)
    logits = 4 * torch.randn(9, 31, dtype=torch.float64)
    targets = torch.randint(31, (9,))
    d_logprob, d_entropy = torch.randn(2, 9, dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    log_p = torch.log_softmax(leaf / temperature, -1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    logprobs = log_p[torch.arange(9), targets]
    value = (d_logprob * logprobs).sum() + with_entropy * (d_entropy * entropies).sum()
    value.backward()
    for softmax in (
        SlicedSoftmax(temperature, 31, CPU),
        CompiledSoftmax(temperature, "aot_eager"),
    ):
        found = logits.clone()
        own, entropy, kept = softmax.forward(found, targets)
        assert (own - logprobs).abs().max() <= 1e-12
        assert (entropy - entropies).abs().max() <= 1e-12
        given = d_entropy if with_entropy else None
        softmax.backward(found, targets, kept, entropy, d_logprob, given)
        assert (found - leaf.grad).abs().max() <= 1e-12


@pytest.mark.slow
@pytest.mark.timeout(300)  # a C++ compiler works, on cores that others use
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_generated_code_of_the_log_softmax_agrees_as_well():
    torch._dynamo.reset()
    torch.manual_seed(2)
    sliced, generated = SlicedSoftmax(0.7, 500, CPU), CompiledSoftmax(0.7)
    for rows in (33, 7):
        logits = (3 * torch.randn(rows, 500)).bfloat16()
        targets = torch.randint(500, (rows,))
        d_logprob = torch.randn(rows)
        results = []
        for softmax in (sliced, generated):
            own = logits.clone()
            logprobs, entropies, kept = softmax.forward(own, targets)
            softmax.backward(own, targets, kept, entropies, d_logprob, None)
            results.append((logprobs, entropies, own.float()))
        for first, second in zip(*results, strict=True):
            assert (first - second).abs().max() <= 2e-2 * first.abs().max()
        assert (results[0][0] - results[1][0]).abs().max() <= 1e-5
