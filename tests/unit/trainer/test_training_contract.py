"""Events of the contract file, and what a step refuses before its weights change."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from activities.storage import layout
from activities.storage.store import Store
from models.errors import ContractViolation, NonFiniteLoss, PerdureError
from models.metrics import refuse_undeclared
from workers.trainers.batch import StepPlan, TrainingBatch, plan_steps, update_seed
from workers.trainers.contract_file import ContractFile
from workers.trainers.local import LocalTrainer
from workers.trainers.normalization import Normalization
from workers.trainers.optimizer_step import OptimizerStep
from workers.trainers.parameter_probe import category
from workers.trainers.ranks import SingleRank, agreed
from workers.trainers.tally import rate_metrics

NAN = float("nan")


def rows(spec) -> list[dict]:
    path = Path(spec.output.root) / layout.TRAINING_CONTRACT
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(before, trainer) -> bool:
    return all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


def all_samples(groups):
    return [sample for group in groups for sample in group.samples]


def test_every_line_is_one_event_of_this_schema(make_spec, make_groups, model_dir):
    spec = make_spec()
    trainer = LocalTrainer(spec, model_dir)
    trainer.optimize(0, "a", make_groups())
    trainer.optimize(1, "b", make_groups(1, version=1))
    lines = (Path(spec.output.root) / layout.TRAINING_CONTRACT).read_text().splitlines()
    for line in lines:
        row = json.loads(line)
        assert line == json.dumps(row, sort_keys=True, separators=(",", ":"))
        assert (row["schema_version"], row["rank"]) == (1, 0)
    order = [(row["event"], row["rollout_id"]) for row in rows(spec)]
    first = [("scoring_check", 0), ("scores", 0), ("optimizer", 0), ("packing", 0)]
    assert order == [*first, ("scores", 1), ("optimizer", 1), ("packing", 1)]


def test_the_optimizer_event_counts_what_the_step_was_divided_by(make_spec, make_groups, model_dir):
    spec = make_spec(
        training={"global_batch_size": 4, "loss_aggregation": "token"},
        optimizer={"lr_schedule": "linear", "learning_rate": 1e-2},
    )
    trainer = LocalTrainer(spec, model_dir)
    trainer.policy_version = 2
    groups = make_groups(version=1)
    for sample in all_samples(groups)[4:]:
        sample.spans = [type(sample.spans[0])(2, 0, len(sample.response_token_ids))]
    report = trainer.optimize(0, "a", groups)
    events = [row for row in rows(spec) if row["event"] == "optimizer"]
    assert [event["step"] for event in events] == [3, 4]
    counts = [event["normalization"] for event in events]
    assert [c["samples"] for c in counts] == [4, 4]
    assert sum(c["token_denominator"] for c in counts) == 36
    assert sum(c["active_tokens"] for c in counts) == 36
    assert sum(c["model_tokens"] for c in counts) == report.metrics["train/model_tokens"]
    assert all(c["model_tokens"] >= c["active_tokens"] for c in counts)
    assert [c["world_size"] for c in counts] == [1, 1]
    last = events[-1]
    assert (last["reduction"], last["published_step"], last["optimizer_skipped"]) == (
        *("token", -1),
        False,
    )
    assert set(last["local_behavior_versions"]) <= {1, 2}
    assert last["lr_used"] == [report.metrics["train/lr_used-pg_0"]] == [6.25e-3]
    assert last["lr_next"] == [report.metrics["train/lr-pg_0"]] == [5e-3]
    assert last["local_microbatches"] >= 1
    assert last["elapsed_seconds"] > 0
    assert last["local_pre_optimizer_gradients"] is None
    assert last["sampled_model_updates"] is None
    assert last["grad_norm"] == report.metrics["train/grad_norm"] > 0
    assert last["parameter_change"] == report.metrics["train/parameter_change"] > 0
    assert last["mixed_reward_groups"] == report.metrics["train/mixed_reward_groups"] == 2
    mean = sum(event["local_policy_objective"] for event in events) / 2
    assert report.metrics["train/policy_objective"] == pytest.approx(mean, rel=1e-12)


def test_the_packing_event_tells_how_the_budget_was_filled(make_spec, make_groups, model_dir):
    spec = make_spec(trainer={"micro_batch_tokens": 30})
    groups = make_groups()
    prompts = [len(group.samples[0].prompt_token_ids) for group in groups]
    report = LocalTrainer(spec, model_dir).optimize(0, "a", groups)
    (event,) = [row for row in rows(spec) if row["event"] == "packing"]
    assert (event["step"], event["rollout_id"], event["samples"]) == (1, 0, 8)
    # two rows, a forward each: prompts with responses of 0+1+2+3 and 4+5+6+7 fed tokens
    assert prompts == [8, 6]
    assert event["packs"] == 2
    assert event["model_tokens"] == report.metrics["train/model_tokens"] == 8 + 6 + 36
    assert event["token_budget"] == 30
    assert event["max_pack_tokens"] == 6 + 22
    assert event["fill_fraction"] == pytest.approx(42 / 60)
    assert event["samples_per_pack"] == 4.0
    assert report.metrics["train/packing/packs_per_rank"] == 2.0
    assert report.metrics["train/packing/tokens_per_pack"] == 25.0


def test_the_tied_samples_of_a_step_count_but_are_not_scored(make_spec, make_groups, model_dir):
    spec = make_spec()
    groups = make_groups(advantages=[[0.75, -0.25, -0.25, -0.25], [0.0] * 4])
    LocalTrainer(spec, model_dir).optimize(0, "a", groups)
    (event,) = [row for row in rows(spec) if row["event"] == "optimizer"]
    assert event["normalization"]["samples"] == 8
    assert event["normalization"]["token_denominator"] == 36
    assert event["normalization"]["active_tokens"] == 10
    assert event["mixed_reward_groups"] == 1


def test_a_diagnostic_step_records_gradients_and_samples_of_the_change(
    make_spec, make_groups, model_dir
):
    spec = make_spec(core={"max_policy_lag": 8, "diagnostic_interval": 2})
    trainer = LocalTrainer(spec, model_dir)
    trainer.optimize(0, "a", make_groups())
    report = trainer.optimize(1, "b", make_groups(1, version=1))
    first, second = [row for row in rows(spec) if row["event"] == "optimizer"]
    assert first["sampled_model_updates"] is None
    gradients = second["local_pre_optimizer_gradients"]
    assert gradients["dense"] == pytest.approx(report.metrics["train/grad_norm"], rel=1e-5)
    assert report.metrics["train/rank0_local_pre_optimizer/dense/l2"] == gradients["dense"]
    updates = second["sampled_model_updates"]["dense"]
    entries = sum(
        min(256, -(-p.numel() // -(-p.numel() // 256))) for p in trainer.model.parameters()
    )
    assert updates["entries"] == entries
    assert 0 < updates["changed"] <= updates["entries"]
    assert 0 < updates["mean_abs"] <= updates["max_abs"] < 0.1


def test_kinds_of_parameters():
    assert category("model.layers.0.mlp.experts.gate_up_proj") == "expert"
    assert category("model.layers.0.mlp.experts.3.up_proj.weight") == "expert"
    assert category("model.layers.0.mlp.gate.weight") == "router"
    assert category("model.layers.0.mlp.gate_proj.weight") == "dense"
    assert category("model.embed_tokens.weight") == "dense"


def test_a_rejected_step_is_recorded_and_moves_nothing(make_spec, make_groups, model_dir):
    spec = make_spec()
    trainer = LocalTrainer(spec, model_dir)
    before = weights(trainer)
    huge = [[1e38, -1e38, 1e38, -1e38]] * 2
    with pytest.raises(NonFiniteLoss, match=r"^rank 0: "):
        trainer.optimize(0, "a", make_groups(advantages=huge))
    rejected = rows(spec)[-1]
    assert rejected["event"] == "optimizer_rejected"
    assert (rejected["step"], rejected["local_optimizer_skipped"]) == (1, True)
    assert same(before, trainer)
    assert (trainer.policy_version, trainer.next_update) == (0, 0)
    assert trainer.optimize(0, "a", make_groups()).policy_version == 1


def test_a_frozen_parameter_is_refused_by_name(make_spec, make_groups, model_dir):
    trainer = LocalTrainer(make_spec(), model_dir)
    before = weights(trainer)
    trainer.model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    with pytest.raises(ContractViolation, match=r"layers\.1\.mlp\.up_proj\.weight; none may be"):
        trainer.optimize(0, "a", make_groups())
    assert same(before, trainer)
    assert trainer.policy_version == 0


def test_masked_log_probs_may_be_anything(make_spec, make_groups, model_dir):
    reports = []
    for wild in (-1.0, NAN):
        groups = make_groups()
        for sample in all_samples(groups):
            length = len(sample.response_token_ids)
            sample.loss_mask = [1] * (length - length // 2) + [0] * (length // 2)
            sample.logprobs[length - length // 2 :] = [wild] * (length // 2)
        trainer = LocalTrainer(make_spec(), model_dir)
        reports.append(trainer.optimize(0, "a", groups).metrics)
    assert reports[0]["train/active_response_tokens"] == 20
    for name in ("train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff"):
        assert reports[0][name] == reports[1][name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.logprobs.__setitem__(1, NAN), r"logprobs\[1\] is nan"),
        (lambda s: s.logprobs.__setitem__(0, math.inf), r"logprobs\[0\] is inf"),
        (lambda s: s.logprobs.pop(), "logprobs has 5 values for 6 response tokens"),
        (lambda s: setattr(s, "loss_mask", [1] * 5), "loss_mask has 5 values for 6"),
        (lambda s: setattr(s, "loss_mask", [1, 0, 2, 1, 1, 1]), r"loss_mask\[2\] is 2, neither"),
    ],
)
def test_bad_tokens_name_rank_sample_and_field(make_spec, make_groups, model_dir, change, message):
    trainer = LocalTrainer(make_spec(), model_dir)
    before = weights(trainer)
    groups = make_groups()
    change(groups[1].samples[1])
    with pytest.raises(ContractViolation, match=f"^rank 0: prompt group 1, sample 5: {message}"):
        trainer.optimize(0, "a", groups)
    assert same(before, trainer)


def test_no_active_token_in_a_step_is_refused(make_spec, make_groups, model_dir):
    trainer = LocalTrainer(make_spec(), model_dir)
    groups = make_groups()
    for sample in all_samples(groups):
        sample.loss_mask = [0] * len(sample.response_token_ids)
    with pytest.raises(
        ContractViolation,
        match=r"^rank 0: optimizer step 1: no active token: loss_mask .* 8 samples",
    ):
        trainer.optimize(0, "a", groups)


def test_no_active_token_in_a_later_step_is_refused_before_the_first(
    make_spec, make_groups, model_dir
):
    spec = make_spec(training={"global_batch_size": 4})
    trainer = LocalTrainer(spec, model_dir)
    before = weights(trainer)
    groups = make_groups()
    seed = update_seed(spec.data.seed, 0)
    _, later = plan_steps(TrainingBatch.of(groups), 2, seed, keep_tied=False)
    for member in later.members:
        sample = all_samples(groups)[member]
        sample.loss_mask = [0] * len(sample.response_token_ids)
    with pytest.raises(ContractViolation, match=r"^rank 0: optimizer step 2: no active token"):
        trainer.optimize(0, "a", groups)
    assert same(before, trainer)
    assert trainer.policy_version == 0


def test_a_score_that_is_no_number_names_sample_and_token(make_spec, make_groups, model_dir):
    trainer = LocalTrainer(make_spec(), model_dir)
    groups = make_groups()
    token = groups[1].samples[2].response_token_ids[3]
    for sample in all_samples(groups):
        if sample is not groups[1].samples[2]:
            sample.response_token_ids = [5] * len(sample.response_token_ids)
    with torch.no_grad():
        trainer.model.get_output_embeddings().weight[token] = math.inf
    with pytest.raises(NonFiniteLoss, match=r"^rank 0: prompt group \d, sample \d, response token"):
        trainer.optimize(0, "a", groups)
    assert rows(trainer.spec)[-1]["event"] == "optimizer_rejected"


def test_a_reference_score_that_is_no_number_is_refused(make_spec, make_groups, model_dir):
    trainer = LocalTrainer(make_spec(training={"kl_loss_coef": 0.1}), model_dir)
    reference = trainer._judge.reference
    next(reference.head.parameters()).data.fill_(NAN)
    with pytest.raises(NonFiniteLoss, match=r"^rank 0: prompt group 0, sample 0, .* reference's"):
        trainer.optimize(0, "a", make_groups())


def test_counts_that_cannot_be_a_step_are_refused():
    good = {"samples": 8, "active_tokens": 10, "token_denominator": 12, "model_tokens": 20}
    Normalization(**good, world_size=2, documents=8).check(8, 1)
    for change, message in (
        ({"samples": 7}, "optimizer step 4: 7 samples over 2 ranks, .*global_batch_size is 8"),
        ({"active_tokens": 0}, "no active token"),
        ({"model_tokens": 9}, "9 model tokens are fewer than the 10 active"),
    ):
        with pytest.raises(ContractViolation, match=message):
            Normalization(**good | change, world_size=2, documents=8).check(8, 4)


def test_a_step_is_dealt_to_ranks_in_equal_parts():
    plan = StepPlan(members=(1, 3, 4, 6), active=(3, 4))
    assert plan.share(0, 2) == StepPlan((1, 3), (3,))
    assert plan.share(1, 2) == StepPlan((4, 6), (4,))
    with pytest.raises(ContractViolation, match=r"4 samples .* 3 ranks"):
        plan.share(0, 3)


def test_rates_need_time_and_ranks_and_enough_model_tokens():
    rates = rate_metrics(800.0, 200.0, 4.0, 2)
    refuse_undeclared(rates)
    assert list(rates.values()) == [200.0, 100.0, 25.0]
    for bad in ((1.0, 1.0, 0.0, 1), (1.0, 1.0, 1.0, 0), (1.0, 2.0, 1.0, 1), (1.0, -1.0, 1.0, 1)):
        with pytest.raises(ContractViolation, match="no rate"):
            rate_metrics(*bad)


def test_the_reference_is_the_prepared_model_and_stays_it(make_spec, make_groups, model_dir):
    spec = make_spec(training={"kl_loss_coef": 0.05, "kl_loss_type": "k3"})
    trainer = LocalTrainer(spec, model_dir)
    first = trainer.optimize(0, "a", make_groups())
    assert first.metrics["train/kl_loss"] == 0.0
    second = trainer.optimize(1, "b", make_groups(1, version=1))
    assert second.metrics["train/kl_loss"] > 0
    fresh = LocalTrainer(make_spec(), model_dir)
    frozen = trainer._judge.reference.body
    for left, right in zip(frozen.parameters(), fresh.model.base_model.parameters(), strict=True):
        assert torch.equal(left, right)
        assert not left.requires_grad


def test_a_kl_term_scores_tied_siblings_as_well(make_spec, make_groups, model_dir):
    groups = make_groups(advantages=[[0.75, -0.25, -0.25, -0.25], [0.0] * 4])
    spec = make_spec(training={"kl_loss_coef": 0.05})
    report = LocalTrainer(spec, model_dir).optimize(0, "a", groups)
    assert report.metrics["train/active_response_tokens"] == 36
    assert report.metrics["train/mixed_reward_groups"] == 1


def test_ratios_against_the_behavior_policy(make_spec, make_groups, model_dir):
    """The mean ratio is then that of trainer and engine, and there are no importance weights."""
    training = {"use_tis": None, "use_rollout_logprobs": True}
    report = LocalTrainer(make_spec(training=training), model_dir).optimize(0, "a", make_groups())
    weighted = LocalTrainer(make_spec(), model_dir).optimize(0, "a", make_groups())
    assert report.metrics["train/ois"] == pytest.approx(weighted.metrics["train/tis"], rel=1e-5)
    assert weighted.metrics["train/ois"] == pytest.approx(1.0, abs=1e-9)
    assert "train/tis" not in report.metrics


@pytest.mark.parametrize(
    "training",
    [
        {"advantage_estimator": "gspo"},
        {"normalize_advantages": True},
        {"dppo_divergence_type": "kl", "global_batch_size": 4},
        {"kl_loss_coef": 0.03, "kl_loss_type": "low_var_kl", "entropy_coef": 0.02},
    ],
)
def test_every_form_of_the_loss_trains_and_repeats(make_spec, make_groups, model_dir, training):
    found = []
    for _ in range(2):
        trainer = LocalTrainer(make_spec(training=training), model_dir)
        for update in range(2):
            version = trainer.policy_version
            report = trainer.optimize(update, "a", make_groups(update, version=version))
        assert report.metrics["train/parameter_change"] > 0
        assert all(math.isfinite(value) for value in report.metrics.values())
        found.append(weights(trainer))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_file_of_another_rank_has_another_name(tmp_path):
    ContractFile(Store(tmp_path), 3).append("scores", {"a": 1})
    row = json.loads((tmp_path / "checkpoints/training_contract_rank3.jsonl").read_text())
    assert row == {"a": 1, "event": "scores", "rank": 3, "schema_version": 1}
    with pytest.raises(ContractViolation, match=r"not finite: a\.1, b\.c\.0"):
        ContractFile(Store(tmp_path)).append("x", {"a": [1.0, NAN], "b": {"c": (math.inf,)}})


def test_an_error_of_one_rank_names_it():
    with pytest.raises(ContractViolation, match=r"^rank 0: wrong") as caught, agreed(SingleRank()):
        raise ContractViolation("wrong")
    assert caught.value.message == "rank 0: wrong"
    with agreed(SingleRank()):
        pass


class OtherRankFails(SingleRank):
    """The first of two ranks; the other one rejects its step."""

    world = 2

    def all_reduce_sum(self, values):
        return values + 1

    def agree(self, error: PerdureError | None) -> None:
        raise NonFiniteLoss("rank 1: NonFiniteLoss: the gradient norm is nan")


def step_among(trainer, ranks) -> OptimizerStep:
    judge = replace(trainer._judge, ranks=ranks)
    return OptimizerStep(trainer.model, trainer.spec.optimizer, trainer._schedule, judge)


def test_a_step_that_another_rank_rejects_is_not_taken_here(make_spec, model_dir):
    step = step_among(LocalTrainer(make_spec(), model_dir), OtherRankFails())
    with pytest.raises(NonFiniteLoss, match=r"^rank 1: "):
        step.refuse_rejected(None, 4, 3)


@pytest.mark.parametrize("clock", [(5, 4), (3, 4), (4, 3), (4, 5)])
def test_ranks_at_different_clocks_take_no_step(make_spec, model_dir, clock):
    class Other(SingleRank):
        world = 2

        def all_reduce_max(self, values):
            completed, published = clock
            return values.maximum(torch.tensor([completed, -completed, published, -published]))

    step = step_among(LocalTrainer(make_spec(), model_dir), Other())
    with pytest.raises(ContractViolation, match="rank 0 is at 4 completed steps with version 4"):
        step.admit(4, 4, 2)


def test_local_counts_are_summed_over_ranks(make_groups):
    class Twice(SingleRank):
        world = 2

        def all_reduce_sum(self, values):
            return 2 * values

    batch = TrainingBatch.of(make_groups())
    counts = Normalization.of(batch, range(4), range(2), 20, Twice())
    assert counts == Normalization(8, 6, 20, 40, 2, documents=4)
