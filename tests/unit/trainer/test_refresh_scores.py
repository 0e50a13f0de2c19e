"""The ``refresh_scores`` event and importance weights over responses of several versions."""

import errno
import json
import math
import os

import pytest
import torch

from activities.storage import layout
from activities.storage.store import Store
from models.errors import ContractViolation, NonFiniteLoss, PolicyDisagreement, StorageFull
from models.metrics import refuse_undeclared
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan
from workers.trainers.batch import TrainingBatch
from workers.trainers.contract_file import ContractFile
from workers.trainers.load import load_model
from workers.trainers.local import LocalTrainer
from workers.trainers.loss import LossSettings
from workers.trainers.ranks import SingleRank
from workers.trainers.refresh_scores import refresh_metrics, refresh_scores

NAN = math.nan
REFRESH = {"publication_mode": "refresh", "max_policy_lag": 8}


def response(index: int, behavior: list[float], *spans: tuple[int, int, int]) -> Sample:
    return Sample(
        sample_index=index,
        group_index=0,
        prompt_token_ids=[5, 6],
        response_token_ids=[9] * len(behavior),
        logprobs=behavior,
        spans=[TokenSpan(*span) for span in spans],
        finish_reason=FinishReason.STOP,
    )


def worked_batch() -> TrainingBatch:
    """Ten tokens of versions 5 and 7, two of version 8, three of version 8 outside the loss."""
    samples = [
        response(0, [-1.0] * 10, (5, 0, 4), (7, 4, 10)),
        response(1, [-2.0, -2.0], (8, 0, 2)),
        response(2, [-3.0] * 3, (8, 0, 3)),
    ]
    return TrainingBatch.of([SampleGroup(0, "p", 0, samples, [0.5, -0.5, 0.0])])


# delta, token by token: 0.5 -0.25 0 1 | 0 0 0 0 -0.75 0.125 | 0.25 0 | not scored
WORKED_OLD = torch.tensor(
    [-0.5, -1.25, -1.0, 0.0, -1.0, -1.0, -1.0, -1.0, -1.75, -0.875, -1.75, -2.0, NAN, NAN, NAN]
)


def scores(batch: TrainingBatch, old: torch.Tensor, settings: LossSettings, **where: int):
    members = range(len(batch.samples))
    return refresh_scores(batch, members, old, settings, SingleRank(), **where)


def test_worked_numbers():
    """e^1 = 2.72 is the only weight above 2; e^-0.25 = 0.78 and e^-0.75 = 0.47 are below 0.8."""
    wide, narrow = LossSettings(use_tis=True), LossSettings(use_tis=True, tis_clip_low=0.8)
    event = scores(worked_batch(), WORKED_OLD, wide, rollout_id=3, policy_version=8)
    prefix = {"tokens": 4, "mean_abs_logratio": 1.75 / 4, "max_abs_logratio": 1.0}
    latest = {"tokens": 8, "mean_abs_logratio": 1.125 / 8, "max_abs_logratio": 0.75}
    assert event == {
        "rollout_id": 3,
        "mixed_responses": 1,
        "response_count": 3,
        "active_tokens": 12,
        "current_version_token_fraction": 2 / 12,
        "historical_prefix": prefix | {"tis_clip_fraction": 0.25},
        "latest_forward": latest | {"tis_clip_fraction": 0.0},
    }
    event = scores(worked_batch(), WORKED_OLD, narrow, rollout_id=3, policy_version=9)
    assert event["current_version_token_fraction"] == 0.0
    assert event["historical_prefix"]["tis_clip_fraction"] == 0.5
    assert event["latest_forward"]["tis_clip_fraction"] == 0.125
    refuse_undeclared(refresh_metrics(event))
    assert refresh_metrics(event)["train/refresh/latest_forward/tokens"] == 8.0


def test_a_weight_at_the_limit_is_not_truncated():
    batch = TrainingBatch.of([SampleGroup(0, "p", 0, [response(0, [-2.0], (1, 0, 1))], [1.0])])
    same = LossSettings(use_tis=True, tis_clip_low=1.0, tis_clip=1.0)
    event = scores(batch, torch.tensor([-2.0]), same, rollout_id=0, policy_version=1)
    assert event["latest_forward"]["tis_clip_fraction"] == 0.0
    assert event["current_version_token_fraction"] == 1.0


def test_a_kind_without_tokens_is_omitted():
    old = torch.where(torch.arange(15) < 4, WORKED_OLD, NAN)
    event = scores(worked_batch(), old, LossSettings(), rollout_id=0, policy_version=8)
    assert event["active_tokens"] == event["historical_prefix"]["tokens"] == 4
    assert "latest_forward" not in event
    nothing = torch.full((15,), NAN)
    event = scores(worked_batch(), nothing, LossSettings(), rollout_id=0, policy_version=8)
    assert event == {
        "rollout_id": 0,
        "mixed_responses": 1,
        "response_count": 3,
        "active_tokens": 0,
        "current_version_token_fraction": 0.0,
    }


def test_responses_are_those_of_the_rank():
    old = torch.where(torch.arange(15) < 10, NAN, WORKED_OLD)
    where = {"rollout_id": 0, "policy_version": 8}
    event = refresh_scores(worked_batch(), (1, 2), old, LossSettings(), SingleRank(), **where)
    assert (event["response_count"], event["mixed_responses"]) == (2, 0)
    assert (event["active_tokens"], event["current_version_token_fraction"]) == (2, 1.0)


def split_spans(groups):
    """Version 0 for the first half of every response longer than two tokens, version 2 after it."""
    for group in groups:
        for sample in group.samples:
            length = len(sample.response_token_ids)
            half = length // 2 if length > 2 else 0
            first = [TokenSpan(0, 0, half)] if half else []
            sample.spans = [*first, TokenSpan(2, half, length)]
    return groups


def plain_scores(model, groups):
    """[(log-prob of the model in float64, behavior log-prob, version, version of the last)]."""
    model = model.double()
    tokens = []
    for sample in (s for g in groups for s in g.samples):
        ids = torch.tensor([sample.prompt_token_ids + sample.response_token_ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(sample.prompt_token_ids) - 1 : -1]
        log_p = torch.log_softmax(logits, -1)
        for place, token in enumerate(sample.response_token_ids):
            version = next(s.version for s in sample.spans if s.start <= place < s.end)
            score = float(log_p[place, token])
            tokens.append((score, sample.logprobs[place], version, sample.spans[-1].version))
    return tokens


def events(spec) -> list[dict]:
    path = f"{spec.output.root}/{layout.TRAINING_CONTRACT}"
    with open(path) as file:
        found = [json.loads(line) for line in file]
    return [event for event in found if event["event"] == "refresh_scores"]


@pytest.mark.parametrize("batch_size", [8, 4])
def test_event_and_weights_equal_a_float64_reference(make_spec, make_groups, model_dir, batch_size):
    spec = make_spec(core=REFRESH, training={"global_batch_size": batch_size})
    trainer = LocalTrainer(spec, model_dir)
    trainer.policy_version = 2
    groups = split_spans(make_groups())
    metrics = trainer.optimize(0, "a", groups).metrics
    tokens = plain_scores(load_model(model_dir), groups)
    (event,) = events(spec)
    assert (event["schema_version"], event["rank"], event["event"]) == (1, 0, "refresh_scores")
    assert (event["rollout_id"], event["response_count"]) == (0, 8)
    assert event["active_tokens"] == len(tokens)
    assert event["mixed_responses"] == sum(len(s.spans) > 1 for g in groups for s in g.samples) > 0
    current = sum(version == 2 for *_, version, _ in tokens)
    assert event["current_version_token_fraction"] == current / len(tokens)
    for kind, historical in (("historical_prefix", True), ("latest_forward", False)):
        deltas = [
            score - behavior
            for score, behavior, version, last in tokens
            if (version < last) is historical
        ]
        assert event[kind]["tokens"] == len(deltas) > 0
        mean, most = sum(map(abs, deltas)) / len(deltas), max(map(abs, deltas))
        assert event[kind]["mean_abs_logratio"] == pytest.approx(mean, rel=1e-5)
        assert event[kind]["max_abs_logratio"] == pytest.approx(most, rel=1e-5)
        clipped = sum(math.exp(d) > 2.0 for d in deltas) / len(deltas)
        assert event[kind]["tis_clip_fraction"] == clipped
        assert metrics[f"train/refresh/{kind}/mean_abs_logratio"] == pytest.approx(mean, rel=1e-5)
    weights = [math.exp(score - behavior) for score, behavior, *_ in tokens]
    assert 0 < sum(w > 2.0 for w in weights) < len(weights)
    mean = math.fsum(weights) / len(weights)
    assert metrics["train/tis"] == pytest.approx(mean, rel=1e-4)
    away = math.fsum(abs(w - 1) for w in weights) / len(weights)
    assert metrics["train/tis_abs"] == pytest.approx(away, rel=1e-4)
    assert metrics["train/tis_clipfrac"] == sum(w > 2.0 for w in weights) / len(weights)
    assert metrics["train/lag"] == 2.0


def test_one_event_an_update_also_without_a_signal(make_spec, make_groups, model_dir):
    spec = make_spec(core=REFRESH)
    trainer = LocalTrainer(spec, model_dir)
    trainer.optimize(0, "a", make_groups())
    trainer.optimize(1, "b", make_groups(advantages=[[0.0] * 4, [0.0] * 4]))
    trainer.optimize(2, "c", make_groups())
    assert [event["rollout_id"] for event in events(spec)] == [0, 1, 2]
    assert [event["active_tokens"] > 0 for event in events(spec)] == [True, False, True]
    assert "latest_forward" not in events(spec)[1]


@pytest.mark.parametrize("mode", ["barrier", "rolling"])
def test_other_publication_modes_have_no_event(make_spec, make_groups, model_dir, mode):
    spec = make_spec(core={"publication_mode": mode, "max_policy_lag": 8})
    report = LocalTrainer(spec, model_dir).optimize(0, "a", make_groups())
    assert events(spec) == []
    assert not [name for name in report.metrics if name.startswith("train/refresh/")]


def test_the_event_is_there_when_the_policies_disagree(make_spec, make_groups, model_dir):
    """It says what the refusal is about."""
    spec = make_spec(core=REFRESH | {"max_train_rollout_logprob_abs_diff": 1e-3})
    with pytest.raises(PolicyDisagreement):
        LocalTrainer(spec, model_dir).optimize(0, "a", make_groups())
    assert events(spec)[0]["latest_forward"]["mean_abs_logratio"] > 1e-3


def test_a_full_disk_is_fatal_before_the_weights_change(
    make_spec, make_groups, model_dir, monkeypatch
):
    spec = make_spec(core=REFRESH)
    trainer = LocalTrainer(spec, model_dir)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("activities.storage.atomic.append_line", full)
        with pytest.raises(StorageFull, match="training_contract_rank0"):
            trainer.optimize(0, "a", make_groups())
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    assert trainer.optimize(0, "a", make_groups()).policy_version == 1
    assert len(events(spec)) == 1


def test_a_non_finite_score_never_reaches_the_file(make_spec, make_groups, model_dir):
    spec = make_spec(core=REFRESH)
    trainer = LocalTrainer(spec, model_dir)
    next(trainer.model.parameters()).data.fill_(NAN)
    with pytest.raises(NonFiniteLoss):
        trainer.optimize(0, "a", make_groups())
    rows = Store(spec.output.root).read_jsonl(layout.TRAINING_CONTRACT).rows
    assert [row["event"] for row in rows] == ["optimizer_rejected"]


def test_contract_lines_are_appended_sorted_and_without_nan(tmp_path):
    file = ContractFile(Store(tmp_path))
    file.append("second", {"b": 1, "a": {"z": 1.5, "y": 2}})
    file.append("first", {})
    with pytest.raises(ContractViolation, match=r"event wrong: not finite: a\.z, b"):
        file.append("wrong", {"b": math.inf, "a": {"z": NAN}})
    assert (tmp_path / layout.TRAINING_CONTRACT).read_text() == (
        '{"a":{"y":2,"z":1.5},"b":1,"event":"second","rank":0,"schema_version":1}\n'
        '{"event":"first","rank":0,"schema_version":1}\n'
    )
