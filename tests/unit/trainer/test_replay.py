"""Routes of samples: what is refused, their rows for the trainer, and whole updates with replay."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from routed_groups import routed

from activities.storage import layout
from models.errors import ConfigurationError, ContractViolation
from workers.trainers.local import LocalTrainer
from workers.trainers.replay import RouteShape, route_problem, route_rows
from workers.trainers.routers import find_routers

SHAPE = RouteShape(layers=2, top_k=2, experts=4)


def good():
    """Three tokens."""
    return np.array([[[0, 1], [2, 3]], [[3, 0], [1, 2]], [[1, 3], [3, 2]]], dtype="<i4")


def changed(place, value):
    routes = good()
    routes[place] = value
    return routes.tobytes()


def test_good_routes_have_no_problem():
    assert route_problem(good().tobytes(), 3, SHAPE) is None


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (None, "is missing: .*--enable-return-routed-experts"),
        (b"", r"has 0 bytes; int32 \[3 tokens, 2 layers, top 2\] has 48"),
        (good()[:2].tobytes(), "has 32 bytes; .* has 48"),
        (good()[:, :1].tobytes(), "has 24 bytes; .* has 48"),
        (good().astype("<i8").tobytes(), "has 96 bytes; .* has 48"),
        (changed((1, 1, 0), 4), r"\[1, 1, 0\] is expert 4, which is outside 0\.\.3"),
        (changed((2, 0, 1), -1), r"\[2, 0, 1\] is expert -1, which is outside 0\.\.3"),
        (changed((1, 0, 1), 3), r"\[1, 0\] chooses expert 3 twice"),
    ],
)
def test_what_no_engine_may_return_is_named(table, says):
    problem = route_problem(table, 3, SHAPE)
    assert problem is not None
    assert re.match(says, problem)


def test_every_document_gets_a_tail_of_the_first_experts():
    rows = route_rows([good().tobytes(), good()[:1].tobytes()], SHAPE)
    tail = [[0, 1], [0, 1]]
    assert rows.tolist() == [*good().tolist(), tail, good()[0].tolist(), tail]


def events(spec, name):
    path = Path(spec.output.root) / layout.TRAINING_CONTRACT
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["event"] == name]


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


REPLAY = {"use_rollout_routing_replay": True}


def test_replay_of_the_own_choice_takes_the_same_step(
    make_spec, make_groups, mixture_dir, tmp_path
):
    moved = {}
    for replay in (False, True):
        root = {"root": str(tmp_path / str(replay))}
        spec = make_spec(
            training={"use_rollout_routing_replay": replay},
            core={"replay_diagnostics": replay},
            output=root,
        )
        trainer = LocalTrainer(spec, mixture_dir)
        report = trainer.optimize(0, "a", routed(make_groups(), mixture_dir))
        (event,) = events(spec, "router_load")
        assert event["routing_replay"] is replay
        moved[replay] = report.metrics
    for key in ("train/grad_norm", "train/loss", "train/train_rollout_logprob_abs_diff"):
        assert moved[True][key] == pytest.approx(moved[False][key], abs=1e-6)


def test_an_update_reports_load_and_replay_of_every_step(make_spec, make_groups, mixture_dir):
    spec = make_spec(
        training={**REPLAY, "global_batch_size": 4},
        core={"replay_diagnostics": True},
        trainer={"micro_batch_tokens": 32},
    )
    trainer = LocalTrainer(spec, mixture_dir)
    groups = routed(make_groups(), mixture_dir)
    report = trainer.optimize(0, "a", groups)
    loads = events(spec, "router_load")
    steps = events(spec, "optimizer")
    packs = events(spec, "packing")
    assert [load["step"] for load in loads] == [1, 2]
    names = ["model.layers.0.mlp.gate", "model.layers.2.mlp.gate"]
    for load, step in zip(loads, steps, strict=True):
        assert set(load) == {
            *("schema_version", "rank", "event", "step", "rollout_id", "scope", "routing_replay"),
            *("summary", "layers", "replicas"),
        }
        assert (load["scope"], load["replicas"]) == ("optimizer_update_training_dispatch", 1)
        assert sorted(load["layers"]) == names
        for layer in load["layers"].values():
            assert layer["assignments"] == 2 * step["normalization"]["model_tokens"]
    for key, value in loads[-1]["summary"].items():
        assert report.metrics[f"train/{key}"] == value
    replays = events(spec, "replay_routes")
    assert [row["phase"] for row in replays] == ["scoring", "training", "training"]
    assert all(row["mismatches"] == 0 for row in replays)
    # one pass scores the samples of both steps
    assert replays[0]["tokens"] == sum(step["normalization"]["model_tokens"] for step in steps)
    for row, step, pack in zip(replays[1:], steps, packs, strict=True):
        counts = step["normalization"]
        assert row["tokens"] == counts["model_tokens"]
        assert row["captured_tokens"] == counts["model_tokens"] - 4
        assert (row["synthetic_tail_tokens"], row["samples"]) == (4, 4)
        layer = dict.fromkeys(("entered", "returned", "grad_enabled"), pack["packs"])
        assert row["layers"] == dict.fromkeys(names, layer)


def test_the_reference_goes_by_its_own_routers(make_spec, make_groups, mixture_dir):
    """At version 0 it is the policy: they differ where replay sends tokens to other experts."""
    found = {}
    for own in (True, False):
        groups = routed(make_groups(), mixture_dir)
        for sample in [] if own else [s for group in groups for s in group.samples]:
            routes = np.frombuffer(sample.routed_experts, "<i4")
            sample.routed_experts = ((routes + 1) % 5).astype("<i4").tobytes()
        spec = make_spec(training={**REPLAY, "kl_loss_coef": 0.1, "kl_loss_type": "k2"})
        metrics = LocalTrainer(spec, mixture_dir).optimize(0, "a", groups).metrics
        found[own] = metrics["train/kl_loss"]
    assert found[True] == pytest.approx(0.0, abs=1e-9)
    assert found[False] > 1e-6


def test_dense_updates_have_no_router_events(make_spec, make_groups, model_dir):
    spec = make_spec(trainer={"packing": "documents"})
    report = LocalTrainer(spec, model_dir).optimize(0, "a", make_groups())
    assert not events(spec, "router_load") + events(spec, "replay_routes")
    assert not [name for name in report.metrics if name.startswith("train/moe/")]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "is missing"),
        (bytes(8), "has 8 bytes"),
        ("range", "is expert 5, which is outside 0..4"),
        ("twice", "chooses expert 1 twice"),
    ],
)
def test_bad_routes_end_the_update_before_any_weight_changes(
    make_spec, make_groups, mixture_dir, value, says
):
    spec = make_spec(training=REPLAY)
    trainer = LocalTrainer(spec, mixture_dir)
    groups = routed(make_groups(), mixture_dir)
    sample = groups[1].samples[2]
    if isinstance(value, str):
        routes = np.frombuffer(sample.routed_experts, "<i4").copy()
        routes[:2] = [1, 5 if value == "range" else 1]
        value = routes.tobytes()
    sample.routed_experts = value
    before = weights(trainer)
    where = f"rank 0: prompt group {sample.group_index}, sample {sample.sample_index}"
    with pytest.raises(ContractViolation, match=f"{where}: routed_experts .*{says}"):
        trainer.optimize(0, "a", groups)
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    assert (trainer.next_update, trainer.policy_version) == (0, 0)


def test_a_mismatch_ends_the_update_before_any_weight_changes(make_spec, make_groups, mixture_dir):
    spec = make_spec(training=REPLAY, core={"replay_diagnostics": True})
    trainer = LocalTrainer(spec, mixture_dir)

    def lie(_module, inputs):
        hidden, chosen, scale = inputs
        return hidden, chosen.flip(0), scale

    layer = find_routers(trainer.model)[1]
    layer.experts.register_forward_pre_hook(lie, prepend=True)
    before = weights(trainer)
    with pytest.raises(ContractViolation, match=f"rank 0: replay .* layer {layer.name}: "):
        trainer.optimize(0, "a", routed(make_groups(), mixture_dir))
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    assert events(spec, "replay_routes")[0]["mismatches"] > 0


@pytest.mark.parametrize(
    ("folder", "sections", "says"),
    [
        ("model_dir", {"training": REPLAY}, "has no routers whose choices could be replayed"),
        ("mixture_dir", {"trainer": {"packing": "shared_prompt"}}, 'needs "documents"'),
        (
            "mixture_dir",
            {"core": {"max_context_length": 17}, "trainer": {"micro_batch_tokens": 16}},
            "raise the latter to at least 17",
        ),
    ],
)
def test_what_contradicts_the_model_ends_the_trainer_at_its_start(
    request, make_spec, folder, sections, says
):
    with pytest.raises(ConfigurationError, match=says):
        LocalTrainer(make_spec(**sections), request.getfixturevalue(folder))
