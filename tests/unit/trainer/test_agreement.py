"""The agreement guard: what it measures, and which planted fault it names."""

import re

import pytest
import torch

from models.errors import PolicyDisagreement
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan
from workers.trainers import agreement
from workers.trainers.agreement import AgreementGuard, Finding, likely_cause, mean_gap
from workers.trainers.batch import TrainingBatch
from workers.trainers.local import LocalTrainer
from workers.trainers.ranks import SingleRank

NAN = float("nan")
LIMIT = 0.01


def distributions(model, sample: Sample) -> torch.Tensor:
    """Logits [T, V] in float64 at the tokens of a response."""
    ids = torch.tensor([sample.prompt_token_ids + sample.response_token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(sample.prompt_token_ids) - 1 : -1]
    return logits.double()


def picked(log_p: torch.Tensor, sample: Sample) -> list[float]:
    return log_p[torch.arange(len(log_p)), sample.response_token_ids].tolist()


def nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Log-probs [T, V] renormalized over the smallest set of at least ``top_p``, token by token."""
    rows = []
    for row in torch.softmax(logits, -1):
        order = sorted(range(len(row)), key=lambda token: -float(row[token]))
        kept, mass = [], 0.0
        for token in order:
            if mass >= top_p:
                break
            kept.append(token)
            mass += float(row[token])
        log_p = torch.full_like(row, -torch.inf)
        log_p[kept] = (row[kept] / mass).log()
        rows.append(log_p)
    return torch.stack(rows)


def sampled_inside(model, groups, top_p: float, temperature: float = 1.0):
    """The groups with responses that the nucleus allows: its most likely tokens."""
    for group in groups:
        for sample in group.samples:
            for place in range(len(sample.response_token_ids)):
                logits = distributions(model, sample)[place : place + 1] / temperature
                allowed = nucleus(logits, top_p)[0].isfinite().nonzero()[:, 0]
                seed = sample.response_token_ids[place]
                sample.response_token_ids[place] = int(allowed[seed % len(allowed)])
    return groups


def engine(model, groups, log_probs):
    """Behavior log-probs as ``log_probs(logits [T, V]) -> [T, V]`` makes them."""
    for group in groups:
        for sample in group.samples:
            sample.logprobs = picked(log_probs(distributions(model, sample)), sample)
    return groups


def full(temperature: float):
    return lambda logits: torch.log_softmax(logits / temperature, -1)


@pytest.fixture
def make_trainer(make_spec, model_dir):
    def make(**inference):
        core = {"max_train_rollout_logprob_abs_diff": LIMIT, "max_policy_lag": 8}
        spec = make_spec(core=core, inference={"dtype": "float32", **inference})
        return LocalTrainer(spec, model_dir)

    return make


def refusal(trainer, groups) -> str:
    """The message of the guard; the weights must be as before."""
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(PolicyDisagreement) as caught:
        trainer.optimize(0, "a", groups)
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    assert trainer.policy_version == 0
    return str(caught.value)


def cause(message: str) -> str:
    return re.split(r"likely: ", message)[1].split("; the gap would be")[0]


def left(message: str) -> float:
    return float(re.search(r"the gap would be ([-\d.e]+)", message)[1])


@pytest.mark.parametrize("direction", ["late", "early"])
def test_a_shift_by_one_token_is_named(make_trainer, make_groups, direction):
    trainer = make_trainer(temperature=0.7, top_p=0.9)
    groups = engine(trainer.model, make_groups(), full(0.7))
    for sample in (s for g in groups for s in g.samples):
        own = sample.logprobs
        sample.logprobs = [own[0], *own[:-1]] if direction == "late" else [*own[1:], own[-1]]
    message = refusal(trainer, groups)
    assert f"recorded one token {direction}" in cause(message)
    assert left(message) < 1e-4
    assert re.search(r"over 36 tokens exceeds .* = 0\.01", message)
    assert "also tried" in message
    assert "temperature" in message.split("also tried")[1]


def test_a_dropped_temperature_is_named(make_trainer, make_groups):
    trainer = make_trainer(temperature=0.7, top_p=0.9)
    message = refusal(trainer, engine(trainer.model, make_groups(), full(1.0)))
    assert "lack inference.temperature = 0.7" in cause(message)
    assert left(message) < 1e-4


def test_a_temperature_applied_twice_is_named(make_trainer, make_groups):
    trainer = make_trainer(temperature=0.7)
    message = refusal(trainer, engine(trainer.model, make_groups(), full(0.49)))
    assert "divides by inference.temperature = 0.7 twice" in cause(message)


def test_a_renormalized_nucleus_is_named(make_trainer, make_groups):
    trainer = make_trainer(temperature=0.7, top_p=0.6)
    groups = sampled_inside(trainer.model, make_groups(), 0.6, 0.7)
    message = refusal(
        trainer, engine(trainer.model, groups, lambda logits: nucleus(logits / 0.7, 0.6))
    )
    assert "renormalized after inference.top_p = 0.6" in cause(message)
    assert "lack the temperature" not in cause(message)
    assert left(message) < 1e-4


def test_a_renormalized_top_k_is_named(make_trainer, make_groups, monkeypatch):
    monkeypatch.setattr(agreement, "_ELEMENTS", 250)  # two rows at a time
    trainer = make_trainer(top_k=100)  # the whole vocabulary: renormalizing changes nothing
    trainer.optimize(0, "a", engine(trainer.model, make_groups(), full(1.0)))
    trainer = make_trainer(top_k=3)
    groups = make_groups()
    for sample in (s for g in groups for s in g.samples):
        for place in range(len(sample.response_token_ids)):
            best = distributions(trainer.model, sample)[place].topk(3).indices
            sample.response_token_ids[place] = int(best[sample.response_token_ids[place] % 3])

    def renormalized(logits):
        kept = logits.topk(3).values.logsumexp(-1, keepdim=True)
        return logits - kept

    message = refusal(trainer, engine(trainer.model, groups, renormalized))
    assert "renormalized after inference.top_p = 1, top_k = 3" in cause(message)


def test_policy_age_is_named_where_only_old_tokens_disagree(make_trainer, make_groups):
    trainer = make_trainer()
    groups = engine(trainer.model, make_groups(), full(1.0))
    trainer.policy_version = 3
    for number, sample in enumerate(s for g in groups for s in g.samples):
        version = 3 if number % 2 else 1
        sample.spans = [TokenSpan(version, 0, len(sample.response_token_ids))]
        if version == 1:
            sample.logprobs = [x - 0.3 + 0.1 * (i % 5) for i, x in enumerate(sample.logprobs)]
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(PolicyDisagreement, match="likely: policy age"):
        trainer.optimize(0, "a", groups)
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())


def test_other_weights_are_none_of_the_known_faults(make_trainer, make_groups, make_model):
    torch.manual_seed(99)
    other = make_model("qwen3")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    trainer = make_trainer(temperature=0.7, top_p=0.9)
    message = refusal(trainer, engine(other, make_groups(), full(0.7)))
    assert cause(message).startswith("weights of another version or model")
    assert "tried without success" in message


def test_agreeing_policies_pass_at_a_temperature_and_a_nucleus(make_trainer, make_groups):
    trainer = make_trainer(temperature=0.7, top_p=0.9)
    report = trainer.optimize(0, "a", engine(trainer.model, make_groups(), full(0.7)))
    assert report.metrics["train/train_rollout_logprob_abs_diff"] < 1e-5


def batch_and_old(gaps: list[float], masks: list[int] | None = None):
    sample = Sample(
        sample_index=0,
        group_index=0,
        prompt_token_ids=[1],
        response_token_ids=[5] * len(gaps),
        logprobs=[-2.0 - gap for gap in gaps],
        spans=[TokenSpan(0, 0, len(gaps))],
        finish_reason=FinishReason.STOP,
        loss_mask=masks,
    )
    batch = TrainingBatch.of([SampleGroup(0, "p", 0, [sample], [1.0])])
    return batch, torch.where(batch.active, -2.0, NAN)


def test_the_mean_over_active_tokens_is_guarded_strictly(make_spec):
    inference = make_spec().inference
    batch, old = batch_and_old([0.5, 0.0, 0.0, 0.5])
    AgreementGuard(0.25, inference, SingleRank()).check(batch, old, None, [], 0)
    with pytest.raises(PolicyDisagreement, match=r"gap 0\.25 over 4 tokens .*largest 0\.5"):
        AgreementGuard(0.2499, inference, SingleRank()).check(batch, old, None, [], 0)
    AgreementGuard(None, inference, SingleRank()).check(batch, old, None, [], 0)


@pytest.mark.parametrize("wild", [NAN, float("inf"), -float("inf"), 99.0])
def test_masked_tokens_are_ignored_even_if_they_are_no_numbers(make_spec, wild):
    batch, old = batch_and_old([0.25, wild, 0.25], [1, 0, 1])
    gap = mean_gap(old, batch.behavior, ~old.isnan(), SingleRank())
    assert (gap.mean, gap.tokens, gap.largest) == (0.25, 2, 0.25)
    AgreementGuard(0.25, make_spec().inference, SingleRank()).check(batch, old, None, [], 0)


def test_without_active_tokens_the_guard_says_zero(make_spec):
    batch, old = batch_and_old([1.0, 1.0], [0, 0])
    gap = mean_gap(old, batch.behavior, ~old.isnan(), SingleRank())
    assert (gap.mean, gap.tokens, gap.largest) == (0.0, 0, 0.0)
    AgreementGuard(1e-9, make_spec().inference, SingleRank()).check(batch, old, None, [], 0)


def test_the_fault_that_explains_most_is_named():
    findings = [Finding("a", 0.4), Finding("b", 0.1), Finding("c", 0.9)]
    told = likely_cause(1.0, findings)
    assert told == "b; the gap would be 0.1 (also tried: a: 0.4; c: 0.9)"
    assert likely_cause(0.15, findings).startswith("weights of another version")
    assert "tried" not in likely_cause(0.15, [])
