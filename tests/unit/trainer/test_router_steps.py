"""What a trainer of a mixture says of its routers' losses and packs, in one process and in two."""

import pytest
import torch
from rank_cases import Job, live, router_gradient
from router_reference import plain_layers, plain_losses
from step_reference import chunks

from activities.storage import layout
from activities.storage.store import Store
from workers.trainers.batch import TrainingBatch
from workers.trainers.documents import greedy_packs
from workers.trainers.load import load_model
from workers.trainers.local import LocalTrainer
from workers.trainers.ranks import SingleRank
from workers.trainers.router_losses import RouterObjective

pytestmark = pytest.mark.timeout(200)  # processes start for the first test

BUDGET = 40
WEIGHTS = {"router_aux_loss_weight": 0.3, "router_z_loss_weight": 0.02}
SEQUENCES = {
    **WEIGHTS,
    "router_aux_loss_grouping": "sequence",
    "router_aux_loss_reduction": "response",
}
TIED = [[0.75, -0.25, -0.25, -0.25], [0.0] * 4]
TOP_K = 2


def events(spec, name, rank=0):
    found, _ = Store(spec.output.root).read_jsonl(layout.training_contract(rank))
    return [row for row in found if row["event"] == name]


def lengths_of(batch):
    return [len(s.prompt_ids) + len(s.response_ids) for s in batch.samples]


@pytest.mark.parametrize("keys", [WEIGHTS, SEQUENCES])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_optimizer_event_has_the_auxiliary_losses(
    make_spec, make_groups, mixture_dir, keys, recompute
):
    trainer_keys = {"micro_batch_tokens": BUDGET, "activation_checkpointing": recompute}
    spec = make_spec(training=keys, trainer=trainer_keys)
    groups = make_groups()
    batch = TrainingBatch.of(groups)
    lengths = lengths_of(batch)
    report = LocalTrainer(spec, mixture_dir).optimize(0, "a", groups)
    model = load_model(mixture_dir, dtype=torch.float64)
    parts = greedy_packs(lengths, BUDGET)
    assert len(parts) > 1
    objective = RouterObjective.of(spec)
    with torch.no_grad():
        balance, z = plain_losses(plain_layers(model, batch, range(8)), parts, objective, TOP_K)
    (event,) = events(spec, "optimizer")
    assert event["auxiliary_denominator"] == sum(lengths) == report.metrics["train/model_tokens"]
    assert event["auxiliary_response_denominator"] == 8
    assert event["router_objective"] == {
        "load_balancing_weight": 0.3,
        "router_z_weight": 0.02,
        "grouping": "pack" if keys is WEIGHTS else "sequence",
        "reduction": "token" if keys is WEIGHTS else "response",
        "z_reduction": "token",
        "count_source": "executed",
    }
    assert event["local_auxiliary_objective"] == pytest.approx(
        {"load_balancing": float(balance), "router_z": float(z)}, rel=1e-5
    )
    assert (event["local_microbatches"], event["stopping_microbatches"]) == (len(parts), 0)
    found = {name: value for name, value in report.metrics.items() if "auxiliary" in name}
    assert found == pytest.approx(
        {
            "train/auxiliary_load_balancing": float(balance),
            "train/auxiliary_router_z": float(z),
        },
        rel=1e-5,
    )
    policy = report.metrics["train/policy_objective"]
    assert policy == pytest.approx(event["local_policy_objective"], rel=1e-12)
    assert report.metrics["train/loss"] == pytest.approx(policy + sum(found.values()), rel=1e-12)


def test_metrics_are_means_over_the_steps_of_an_update(make_spec, make_groups, mixture_dir):
    spec = make_spec(training={**WEIGHTS, "global_batch_size": 4})
    report = LocalTrainer(spec, mixture_dir).optimize(0, "a", make_groups())
    steps = [row["local_auxiliary_objective"] for row in events(spec, "optimizer")]
    assert len(steps) == 2
    for name in ("load_balancing", "router_z"):
        mean = sum(step[name] for step in steps) / 2
        assert report.metrics[f"train/auxiliary_{name}"] == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("weights", [{}, WEIGHTS])
def test_a_mixture_computes_tied_samples_as_well(make_spec, make_groups, mixture_dir, weights):
    """Their tokens count in the load of routers, and have a part in auxiliary losses."""
    spec = make_spec(training=weights)
    groups = make_groups(advantages=TIED)
    report = LocalTrainer(spec, mixture_dir).optimize(0, "a", groups)
    tokens = sum(lengths_of(TrainingBatch.of(groups)))
    (event,), (load,) = events(spec, "optimizer"), events(spec, "router_load")
    assert event["auxiliary_response_denominator"] == 8
    assert event["auxiliary_denominator"] == event["normalization"]["model_tokens"] == tokens
    assert {layer["assignments"] for layer in load["layers"].values()} == {tokens * TOP_K}
    assert report.metrics["train/mixed_reward_groups"] == 1
    assert "train/auxiliary_router_z" in report.metrics


def test_the_balance_of_packs_is_that_of_their_own_counts(make_spec, make_groups, mixture_dir):
    spec = make_spec(trainer={"micro_batch_tokens": BUDGET})
    groups = make_groups()
    batch = TrainingBatch.of(groups)
    report = LocalTrainer(spec, mixture_dir).optimize(0, "a", groups)
    layers = plain_layers(load_model(mixture_dir), batch, range(8))
    parts = greedy_packs(lengths_of(batch), BUDGET)
    skews, peaks = [], []
    for part in parts:
        counts = []
        for layer in layers:
            ids = [e for m in part for row in layer.chosen[m].tolist() for e in row]
            counts.append([ids.count(expert) for expert in range(5)])
        peaks.append([max(loads) for loads in counts])
        skews.append(sum(peaks[-1]) / sum(sum(loads) / 5 for loads in counts))
    (event,) = events(spec, "expert_balance")
    assert (
        event.items()
        >= {
            "step": 1,
            "rollout_id": 0,
            "packs_per_rank": len(parts),
            "dispatches": len(parts),
            "slots": 5,
            "max_slot_assignments": max(map(max, peaks)),
            "critical_work_proxy": sum(map(sum, peaks)),
        }.items()
    )
    assert event["skew_mean"] == pytest.approx(sum(skews) / len(skews), abs=1e-12)
    assert event["skew_max"] == pytest.approx(max(skews), abs=1e-12)
    skew = "train/packing/expert_dispatch_skew_"
    assert report.metrics[f"{skew}mean"] == event["skew_mean"]
    assert report.metrics[f"{skew}max"] == event["skew_max"] >= event["skew_mean"] > 1


def test_a_dense_model_has_denominators_and_no_losses(make_spec, make_groups, model_dir):
    spec = make_spec()
    report = LocalTrainer(spec, model_dir).optimize(0, "a", make_groups())
    (event,) = events(spec, "optimizer")
    assert event["auxiliary_denominator"] == event["normalization"]["model_tokens"]
    assert event["auxiliary_response_denominator"] == 8
    assert event["local_auxiliary_objective"] == {"load_balancing": 0.0, "router_z": 0.0}
    assert event["router_objective"]["load_balancing_weight"] == 0.0
    assert not events(spec, "expert_balance")
    assert not [n for n in report.metrics if "auxiliary" in n or "skew" in n]
    assert report.metrics["train/loss"] == report.metrics["train/policy_objective"]


@pytest.mark.parametrize("grouping", ["pack", "sequence"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_of_two_ranks_is_that_of_plain_autograd(
    two_ranks, make_groups, mixture_dir, grouping, recompute
):
    """The second rank has one pack less, and computes a filler."""
    objective = RouterObjective(0.3, 0.02, grouping, "response", "token")
    batch = TrainingBatch.of(make_groups())
    model = load_model(mixture_dir, dtype=torch.float64)
    parts = [*chunks(range(4), 2), [4, 5, 6, 7]]
    balance, z = plain_losses(plain_layers(model, batch, range(8)), parts, objective, TOP_K)
    (balance + z).backward()
    expected = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    answers = two_ranks.run(router_gradient, mixture_dir, make_groups(), objective, recompute)
    for total, found in answers:
        assert total == pytest.approx(float((balance + z).detach()), abs=2e-7)
        for name, values in found.items():
            assert abs(values - expected.get(name, 0.0)).max() <= 2e-7, name
    assert max(abs(g).max() for n, g in expected.items() if ".gate." in n) > 1e-3


def test_events_of_two_ranks_add_up_to_those_of_one(two_ranks, make_spec, make_groups, mixture_dir):
    roots = {"output": {"root": f"{mixture_dir}-alone"}}
    smooth = {"learning_rate": 1e-2, "adam_eps": 0.1}
    spec = make_spec(training=SEQUENCES, optimizer=smooth)
    updates = [(0, make_groups()), (1, make_groups(1, version=1))]
    single = live(
        SingleRank(),
        Job(make_spec(training=SEQUENCES, optimizer=smooth, **roots), mixture_dir, updates=updates),
    )
    both = two_ranks.run(live, Job(spec, mixture_dir, updates=updates))
    theirs = events(make_spec(**roots), "optimizer")
    ours = [events(spec, "optimizer", rank) for rank in (0, 1)]
    for whole, *ranks in zip(theirs, *ours, strict=True):
        for row in ranks:
            for key in ("auxiliary_denominator", "auxiliary_response_denominator"):
                assert row[key] == whole[key]
        for name, value in whole["local_auxiliary_objective"].items():
            parts = [row["local_auxiliary_objective"][name] for row in ranks]
            assert min(parts) > 0
            assert sum(parts) == pytest.approx(value, rel=1e-4)
    for outcome in both:
        for key in ("auxiliary_load_balancing", "auxiliary_router_z", "loss", "grad_norm"):
            found = outcome.reports[1].metrics[f"train/{key}"]
            assert found == pytest.approx(single.reports[1].metrics[f"train/{key}"], rel=1e-4)
        for name, values in single.parameters.items():
            assert abs(outcome.parameters[name] - values).max() <= 1e-5, name
    balances = [events(spec, "expert_balance", rank) for rank in (0, 1)]
    apart = [[{**row, "rank": 0} for row in rows] for rows in balances]
    assert apart[0] == apart[1]
    assert {row["dispatches"] for row in apart[0]} == {2}
