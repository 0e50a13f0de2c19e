"""When a scoring pass is needed, when it is checked, and what the check says."""

import json
from pathlib import Path

import pytest
import torch

from activities.storage import layout
from configs.scoring import scoring_plan
from models.errors import NonFiniteLoss, PolicyDisagreement
from workers.trainers.local import LocalTrainer
from workers.trainers.logprobs import Scorer
from workers.trainers.ranks import SingleRank
from workers.trainers.scoring import ScoringDecision, refuse_scoring_gap, scoring_check

NAN = float("nan")


class Config:
    """As much of a transformers configuration as is looked at."""

    def __init__(self, **fields: object) -> None:
        self._fields = fields

    def to_dict(self) -> dict[str, object]:
        return self._fields


def events(spec, name: str | None = None) -> list[dict]:
    path = Path(spec.output.root) / layout.TRAINING_CONTRACT
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if name in (None, row["event"])]


def test_the_pass_is_skipped_only_where_one_training_forward_can_stand_for_it(make_spec):
    assert not scoring_plan(make_spec()).standalone
    required = {"max_policy_lag": 8, "scoring_pass_required": True}
    needed = {
        "core.scoring_pass_required": scoring_plan(make_spec(core=required)),
        "2 optimizer steps": scoring_plan(make_spec(training={"global_batch_size": 4})),
        "resid_dropout": ScoringDecision(make_spec(), Config(a=1, resid_dropout=0.1)).plan,
    }
    for reason, plan in needed.items():
        assert plan.standalone, reason
        assert reason in plan.reason
    for anchored in ({}, {"use_tis": None, "use_rollout_logprobs": True}):
        decision = ScoringDecision(make_spec(training=anchored), Config(attention_dropout=0.0))
        assert not decision.plan.standalone


def test_a_check_is_due_in_the_first_update_of_a_process_and_on_the_interval(make_spec):
    core = {"max_policy_lag": 8, "scoring_check_interval": 50}
    decision = ScoringDecision(make_spec(core=core), Config())
    assert decision.check_due(7)
    decision.checked()
    assert [s for s in range(1, 201) if decision.check_due(s)] == [50, 100, 150, 200]
    only_first = ScoringDecision(make_spec(core=core | {"scoring_check_interval": 0}), Config())
    assert only_first.check_due(50)
    only_first.checked()
    assert not any(only_first.check_due(s) for s in range(200))
    for needed in (
        make_spec(core=core | {"scoring_pass_required": True}),
        make_spec(core=core, training={"global_batch_size": 4}),
    ):
        assert not ScoringDecision(needed, Config()).check_due(0)


def test_the_check_counts_tokens_that_both_scored():
    standalone = torch.tensor([-1.0, -2.0, NAN, -4.0, -5.0])
    training = torch.tensor([-1.0, -2.5, -3.0, NAN, -5.0625])
    event = scoring_check(standalone, training, SingleRank(), rollout_id=4, tolerance=0.1)
    assert event == {
        "rollout_id": 4,
        "active_tokens": 3,
        "mean_abs": 0.1875,
        "max_abs": 0.5,
        "tokens_above_edge": 2,
        "edge": 1e-3,
        "tolerance": 0.1,
    }
    with pytest.raises(PolicyDisagreement, match=r"differ by 0\.1875 .*scoring_check_tolerance"):
        refuse_scoring_gap(event)
    refuse_scoring_gap(event | {"tolerance": 0.1875})
    nothing = scoring_check(standalone, standalone * NAN, SingleRank(), rollout_id=0, tolerance=1.0)
    assert (nothing["active_tokens"], nothing["mean_abs"], nothing["max_abs"]) == (0, 0.0, 0.0)


def test_updates_tell_where_their_scores_come_from(make_spec, make_groups, model_dir):
    spec = make_spec(core={"max_policy_lag": 8, "scoring_check_interval": 2})
    trainer = LocalTrainer(spec, model_dir)
    for update in range(4):
        trainer.optimize(update, str(update), make_groups(update, version=update))
    passes = [event["scoring_pass"] for event in events(spec, "optimizer")]
    assert passes == ["checked", "skipped", "checked", "skipped"]
    checks = events(spec, "scoring_check")
    assert [check["rollout_id"] for check in checks] == [0, 2]
    assert all(check["mean_abs"] < 1e-5 for check in checks)
    assert [event["source"] for event in events(spec, "scores")] == ["training_forward"] * 4
    assert events(spec, "score_timing") == []


def test_a_required_pass_scores_everything_and_changes_nothing(make_spec, make_groups, model_dir):
    skipping = LocalTrainer(make_spec(), model_dir)
    skipping.optimize(0, "a", make_groups())
    core = {"max_policy_lag": 8, "scoring_pass_required": True}
    spec = make_spec(core=core, output={"root": str(model_dir / "forced")})
    forced = LocalTrainer(spec, model_dir)
    report = forced.optimize(0, "a", make_groups())
    assert report.metrics["train/ess_ratio"] == pytest.approx(1.0, abs=1e-9)
    for (name, left), right in zip(
        skipping.model.named_parameters(), forced.model.parameters(), strict=True
    ):
        # Adam's first step is the gradient's sign: compare where rounding cannot turn it
        assert (left - right).abs().median() < 1e-6, name
    (optimizer,) = events(spec, "optimizer")
    assert optimizer["scoring_pass"] == "standalone"
    (timing,) = events(spec, "score_timing")
    assert timing["model_tokens"] == report.metrics["train/model_tokens"]
    assert timing["seconds"] > 0
    assert timing["row_specialization"] == "dynamic"
    assert events(spec, "scores")[0]["source"] == "standalone"
    assert events(spec, "scoring_check") == []


def test_one_pass_scores_the_samples_of_all_steps_before_the_first(
    make_spec, make_groups, model_dir
):
    spec = make_spec(training={"global_batch_size": 4})
    report = LocalTrainer(spec, model_dir).optimize(0, "a", make_groups())
    order = [event["event"] for event in events(spec)]
    step = ["optimizer", "packing"]
    assert order == ["score_timing", "scores", *step, *step]
    assert [event["scoring_pass"] for event in events(spec, "optimizer")] == ["standalone"] * 2
    (timing,), (profile,) = events(spec, "score_timing"), events(spec, "scores")
    assert timing["model_tokens"] == report.metrics["train/model_tokens"]
    assert (profile["source"], profile["active_tokens"]) == ("standalone", 36)


def test_a_pass_that_the_engines_contradict_ends_the_update_before_any_training(
    make_spec, make_groups, model_dir, monkeypatch
):
    core = {"max_policy_lag": 8, "max_train_rollout_logprob_abs_diff": 0.01}
    spec = make_spec(core=core, training={"global_batch_size": 4})
    trainer = LocalTrainer(spec, model_dir)
    trained = []
    monkeypatch.setattr(Scorer, "backward", lambda *_, **__: trained.append(1))
    with pytest.raises(PolicyDisagreement, match="max_train_rollout_logprob_abs_diff"):
        trainer.optimize(0, "a", make_groups())
    assert trained == []
    assert [event["event"] for event in events(spec)] == ["score_timing", "scores"]
    assert (trainer.policy_version, trainer.next_update) == (0, 0)


def test_a_forward_that_depends_on_its_pass_is_refused_before_the_weights_change(
    make_spec, make_groups, model_dir, monkeypatch
):
    spec = make_spec()
    trainer = LocalTrainer(spec, model_dir)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    score = Scorer.score

    def off(self, batch):
        logprobs, entropies = score(self, batch)
        return logprobs + 0.01, entropies

    monkeypatch.setattr(Scorer, "score", off)
    with pytest.raises(PolicyDisagreement, match="the training forward"):
        trainer.optimize(0, "a", make_groups())
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    (check,) = events(spec, "scoring_check")
    assert check["mean_abs"] == pytest.approx(0.01, rel=1e-3)
    assert check["tokens_above_edge"] == check["active_tokens"] == 36
    assert events(spec, "optimizer") == []
    assert trainer.policy_version == 0


@pytest.mark.parametrize("wrong", [NAN, float("inf")])
def test_a_pass_that_scores_no_number_is_refused_by_sample(
    make_spec, make_groups, model_dir, monkeypatch, wrong
):
    """It is no token that the pass did not look at."""
    spec = make_spec()
    trainer = LocalTrainer(spec, model_dir)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    score = Scorer.score

    def broken(self, batch):
        logprobs, entropies = score(self, batch)
        logprobs[batch.token_index == 12] = wrong  # the third token of the fifth sample
        return logprobs, entropies

    monkeypatch.setattr(Scorer, "score", broken)
    where = "rank 0: prompt group 1, sample 4, response token 2"
    with pytest.raises(NonFiniteLoss, match=f"^{where}: the scoring pass's log-prob is (nan|inf)"):
        trainer.optimize(0, "a", make_groups())
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    assert not Path(spec.output.root, layout.TRAINING_CONTRACT).exists()
