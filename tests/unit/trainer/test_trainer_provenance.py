"""Spans, log-probs and lag at consumption: what the trainer refuses, and by which name."""

import math

import pytest

from models.errors import ContractViolation
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan
from workers.trainers.batch import TrainingBatch
from workers.trainers.local import LocalTrainer
from workers.trainers.provenance import TokenVersions


def response(length: int, *spans: tuple[int, int, int], group: int = 7, index: int = 31) -> Sample:
    """Spans as (version, start, end)."""
    return Sample(
        sample_index=index,
        group_index=group,
        prompt_token_ids=[5, 6],
        response_token_ids=list(range(10, 10 + length)),
        logprobs=[-1.0] * length,
        spans=[TokenSpan(*span) for span in spans],
        finish_reason=FinishReason.STOP,
    )


def group_of(*samples: Sample) -> SampleGroup:
    return SampleGroup(samples[0].group_index, "p", 0, list(samples), [0.0] * len(samples))


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(5, 1, 10)],
        [(5, 0, 4), (7, 5, 10)],
        [(5, 0, 4), (7, 3, 10)],
        [(5, 0, 4), (7, 4, 9)],
        [(5, 0, 4), (7, 4, 11)],
        [(7, 0, 4), (6, 4, 10)],
        [(5, 0, 0), (7, 0, 10)],
        [(5, 0, 4), (5, 4, 10)],
        [(-1, 0, 10)],
    ],
)
def test_spans_that_do_not_tell_the_version_of_each_token_are_refused(spans):
    with pytest.raises(ContractViolation, match=r"prompt group 7, sample 31: .*spans"):
        TrainingBatch.of([group_of(response(10, *spans))])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_finite_log_prob_a_token(value):
    wrong = response(3, (0, 0, 3))
    wrong.logprobs[1] = value
    with pytest.raises(ContractViolation, match=r"group 7, sample 31: logprobs\[1\]"):
        TrainingBatch.of([group_of(wrong)])
    wrong.logprobs[1:] = [-1.0]
    with pytest.raises(ContractViolation, match="sample 31: logprobs has 2 values for 3 "):
        TrainingBatch.of([group_of(wrong)])


def test_nothing_is_trained_on_no_tokens():
    with pytest.raises(ContractViolation, match="sample 31: response_token_ids is empty"):
        TrainingBatch.of([group_of(response(0))])
    with pytest.raises(ContractViolation, match="the collection holds no samples"):
        TrainingBatch.of([])


def test_versions_of_every_token_by_hand():
    groups = [
        group_of(response(5, (5, 0, 2), (7, 2, 5), index=0)),
        group_of(response(1, (6, 0, 1), index=2), response(3, (4, 0, 1), (5, 1, 3), index=3)),
    ]
    versions = TrainingBatch.of(groups).versions
    assert versions.sampled_by.tolist() == [5, 5, 7, 7, 7, 6, 4, 5, 5]
    assert versions.replay.tolist() == [7, 7, 7, 7, 7, 6, 5, 5, 5]
    assert versions.mixed.sum() == 2
    assert versions.lag(8, 4) == 4


def test_the_oldest_and_the_newest_token_are_named_with_both_versions():
    old, new = response(4, (5, 0, 1), (7, 1, 4), index=8), response(2, (6, 0, 2), index=9)
    versions = TokenVersions.of([group_of(old, new)])
    with pytest.raises(
        ContractViolation,
        match=r"group 7, sample 8: .* version 5, .* version 8: lag 3 is outside 0\.\.2",
    ):
        versions.lag(8, 2)
    # the oldest token is old enough; a later one of the same response comes from the future
    with pytest.raises(ContractViolation, match=r"sample 8: .* version 7, .* version 6: lag -1"):
        versions.lag(6, 2)


def with_spans(groups, *spans):
    """The same span list for the first response, which must be long enough."""
    groups[0].samples[0].spans = [TokenSpan(*span) for span in spans]
    return groups


def test_lag_limit_leaves_room_for_the_steps_of_the_update(make_spec, make_groups, model_dir):
    """Limit 2 with two steps: a group may be one step old, since the second step makes it two."""
    spec = make_spec(core={"max_policy_lag": 2}, training={"global_batch_size": 4})
    trainer = LocalTrainer(spec, model_dir)
    trainer.policy_version = 3
    trainer.optimize(0, "a", make_groups(version=2))
    assert trainer.policy_version == 5
    with pytest.raises(
        ContractViolation, match=r"version 3, .* version 5: lag 2 is outside 0\.\.1"
    ):
        trainer.optimize(1, "b", with_spans(make_groups(version=5), (3, 0, 1)))
    assert (trainer.policy_version, trainer.next_update) == (5, 1)


def test_lag_is_checked_again_before_every_step(make_spec, make_groups, model_dir, monkeypatch):
    """A clock that jumps between two steps must not go unseen."""
    spec = make_spec(core={"max_policy_lag": 2}, training={"global_batch_size": 4})
    trainer = LocalTrainer(spec, model_dir)
    step = trainer._step

    def jump():
        metrics = step()
        trainer.policy_version += 4
        return metrics

    monkeypatch.setattr(trainer, "_step", jump)
    with pytest.raises(
        ContractViolation, match=r"version 0, .* version 5: lag 5 is outside 0\.\.2"
    ):
        trainer.optimize(0, "a", make_groups())


def test_a_sample_from_the_future_is_refused(make_spec, make_groups, model_dir):
    trainer = LocalTrainer(make_spec(), model_dir)
    with pytest.raises(ContractViolation, match=r"version 1, .* version 0: lag -1"):
        trainer.optimize(0, "a", with_spans(make_groups(), (1, 0, 1)))
    assert trainer.next_update == 0
