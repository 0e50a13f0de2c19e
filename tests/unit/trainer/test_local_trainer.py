"""One update of the local trainer against plain torch, and what it refuses."""

import math

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from models.errors import (
    ConfigurationError,
    ContractViolation,
    NonFiniteLoss,
    PolicyDisagreement,
    TrainerLost,
)
from workers.trainers import load, local
from workers.trainers.batch import TrainingBatch, plan_steps, update_seed
from workers.trainers.load import load_model, load_policy
from workers.trainers.local import LocalTrainer


def parameters(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def with_behavior_of(trainer: LocalTrainer, groups):
    """The same groups, with the trainer's own log-probs as behavior log-probs."""
    for group in groups:
        for sample in group.samples:
            ids = torch.tensor([sample.prompt_token_ids + sample.response_token_ids])
            with torch.no_grad():
                logits = trainer.model(input_ids=ids).logits[0, len(sample.prompt_token_ids) - 1 :]
            log_p = torch.log_softmax(logits[:-1].float(), -1)
            picked = log_p[torch.arange(len(sample.response_token_ids)), sample.response_token_ids]
            sample.logprobs = picked.tolist()
    return groups


# Adam's first step is almost the gradient's sign, which rounding can flip where it is tiny; a large
# epsilon makes the step proportional to the gradient, so that steps can be compared.
SMOOTH = {"learning_rate": 1e-2, "adam_eps": 0.1}


def plain_update(model, groups):
    """The same update in the plainest way: one sample a forward, full logits, token mean."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=0.1, weight_decay=0.0
    )
    tokens = sum(len(s.response_token_ids) for g in groups for s in g.samples)
    for group in groups:
        for sample, advantage in zip(group.samples, group.advantages, strict=True):
            ids = torch.tensor([sample.prompt_token_ids + sample.response_token_ids])
            logits = model(input_ids=ids).logits[0, len(sample.prompt_token_ids) - 1 : -1]
            log_p = torch.log_softmax(logits, -1)
            new = log_p[torch.arange(len(sample.response_token_ids)), sample.response_token_ids]
            weight = (new.detach() - torch.tensor(sample.logprobs)).exp().clamp(0, 2)
            ratio = (new - new.detach()).exp()
            (-(weight * ratio * advantage).sum() / tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(norm)


def test_update_equals_a_plain_loop(make_spec, make_groups, model_dir):
    spec = make_spec(
        training={"loss_aggregation": "token", "rollout_batch_size": 3}, optimizer=SMOOTH
    )
    groups = make_groups(num_groups=3)
    trainer = LocalTrainer(spec, model_dir)
    before = parameters(trainer)
    report = trainer.optimize(0, "a" * 64, groups)
    reference = load_model(model_dir)
    norm = plain_update(reference, groups)
    assert report.metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    after = parameters(trainer)
    for name, parameter in reference.named_parameters():
        assert torch.allclose(after[name], parameter, atol=1e-6), name
    moved = math.sqrt(sum(float((after[n] - before[n]).double().square().sum()) for n in after))
    assert report.metrics["train/parameter_change"] == pytest.approx(moved, rel=1e-3)


def test_parameter_change_includes_weight_decay(make_spec, make_groups, model_dir):
    spec = make_spec(optimizer={"weight_decay": 0.5})
    trainer = LocalTrainer(spec, model_dir)
    before = parameters(trainer)
    report = trainer.optimize(0, "a", make_groups())
    after = parameters(trainer)
    moved = math.sqrt(sum(float((after[n] - before[n]).double().square().sum()) for n in after))
    assert report.metrics["train/parameter_change"] == pytest.approx(moved, rel=1e-3)


@pytest.mark.parametrize("budget", [16, 40, 4096])
def test_ratios_are_one_without_lag_at_every_micro_batch_size(
    make_spec, make_groups, model_dir, budget
):
    trainer = LocalTrainer(make_spec(trainer={"micro_batch_tokens": budget}), model_dir)
    groups = with_behavior_of(trainer, make_groups())
    metrics = trainer.optimize(0, "a", groups).metrics
    assert metrics["train/ess_ratio"] == pytest.approx(1.0, abs=1e-9)
    assert metrics["train/ppo_kl"] == 0.0
    assert metrics["train/tis"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert metrics["train/pg_clipfrac"] == 0.0


@pytest.mark.parametrize("aggregation", ["response", "token"])
def test_micro_batches_do_not_change_the_gradient(make_spec, make_groups, model_dir, aggregation):
    norms = []
    for budget in (16, 40, 4096):
        spec = make_spec(
            trainer={"micro_batch_tokens": budget, "logprob_chunk_tokens": 16},
            training={"loss_aggregation": aggregation},
        )
        report = LocalTrainer(spec, model_dir).optimize(0, "a", make_groups())
        norms.append(report.metrics["train/grad_norm"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("aggregation", ["response", "token"])
def test_tied_groups_are_skipped_but_counted(
    make_spec, make_groups, model_dir, aggregation, monkeypatch
):
    """Skipping a group with equal rewards equals computing it with its zero advantages."""
    advantages = [[0.75, -0.25, -0.25, -0.25], [0.0] * 4]
    spec = make_spec(training={"loss_aggregation": aggregation}, optimizer=SMOOTH)
    groups = make_groups(advantages=advantages)
    skipping = LocalTrainer(spec, model_dir)
    skipped = skipping.optimize(0, "a", groups)
    monkeypatch.setattr(
        local,
        "plan_steps",
        lambda batch, steps, seed, keep_tied: plan_steps(batch, steps, seed, keep_tied=True),
    )
    computing = LocalTrainer(spec, model_dir)
    computed = computing.optimize(0, "a", groups)
    assert skipped.metrics["train/model_tokens"] < computed.metrics["train/model_tokens"]
    assert skipped.metrics["train/grad_norm"] == pytest.approx(
        computed.metrics["train/grad_norm"], rel=1e-5
    )
    for left, right in zip(
        parameters(skipping).values(), parameters(computing).values(), strict=True
    ):
        assert torch.allclose(left, right, atol=1e-6)


def test_same_inputs_give_the_same_bits(make_spec, make_groups, model_dir):
    results = []
    for _ in range(2):
        trainer = LocalTrainer(make_spec(training={"global_batch_size": 4}), model_dir)
        trainer.optimize(0, "a", make_groups(0))
        trainer.optimize(1, "b", make_groups(1))
        results.append(parameters(trainer))
    assert same(*results)


def test_two_steps_an_update_move_the_version_by_two(make_spec, make_groups, model_dir):
    trainer = LocalTrainer(make_spec(training={"global_batch_size": 4}), model_dir)
    report = trainer.optimize(0, "a", make_groups())
    assert (report.policy_version, report.optimizer_steps) == (2, 2)
    assert trainer.policy_version == 2
    assert trainer.next_update == 1
    # the second step's ratios are taken against the log-probs before the first
    assert report.metrics["train/ess_ratio"] < 1.0
    assert report.metrics["train/ppo_kl"] != 0.0


def test_old_log_probs_of_every_step_are_of_the_weights_before_the_first(
    make_spec, make_groups, model_dir
):
    trainer = LocalTrainer(make_spec(training={"global_batch_size": 4}), model_dir)
    groups = with_behavior_of(trainer, make_groups())
    metrics = trainer.optimize(0, "a", groups).metrics
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert metrics["train/tis"] == pytest.approx(1.0, abs=1e-5)


def test_steps_deal_every_sample_once_by_a_seeded_permutation(make_groups):
    batch = TrainingBatch.of(make_groups(num_groups=4))
    plans = plan_steps(batch, 4, update_seed(17, 3), keep_tied=False)
    assert sorted(m for plan in plans for m in plan.members) == list(range(16))
    assert [len(plan.members) for plan in plans] == [4] * 4
    again = plan_steps(batch, 4, update_seed(17, 3), keep_tied=False)
    other = plan_steps(batch, 4, update_seed(17, 4), keep_tied=False)
    assert plans == again
    assert plans != other


def test_without_any_signal_nothing_is_stepped(make_spec, make_groups, model_dir):
    trainer = LocalTrainer(make_spec(training={"entropy_coef": 0.01}), model_dir)
    before = parameters(trainer)
    report = trainer.optimize(0, "a", make_groups(advantages=[[0.0] * 4, [0.0] * 4]))
    assert report.no_signal
    assert (report.policy_version, report.optimizer_steps) == (0, 0)
    assert same(before, parameters(trainer))
    assert trainer.next_update == 1


def test_no_parameter_is_frozen_by_mistake(make_spec, make_groups, model_dir):
    trainer = LocalTrainer(make_spec(), model_dir)
    before = parameters(trainer)
    trainer.optimize(0, "a", make_groups())
    after = parameters(trainer)
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_disagreement_is_refused_before_the_weights_change(make_spec, make_groups, model_dir):
    trainer = LocalTrainer(
        make_spec(core={"max_train_rollout_logprob_abs_diff": 0.01, "max_policy_lag": 8}), model_dir
    )
    before = parameters(trainer)
    groups = with_behavior_of(trainer, make_groups())
    for group in groups:  # log-probs of another token: shifted by one
        for sample in group.samples:
            sample.logprobs = sample.logprobs[1:] + sample.logprobs[:1]
    with pytest.raises(PolicyDisagreement, match=r"mean .* exceeds .* = 0\.01 .*likely"):
        trainer.optimize(0, "a", groups)
    assert same(before, parameters(trainer))
    assert trainer.policy_version == 0


def test_dropped_temperature_trips_the_guard(make_spec, make_groups, model_dir):
    spec = make_spec(
        core={"max_train_rollout_logprob_abs_diff": 0.01, "max_policy_lag": 8},
        inference={"temperature": 0.7, "dtype": "float32"},
    )
    trainer = LocalTrainer(spec, model_dir)
    with pytest.raises(PolicyDisagreement):
        trainer.optimize(0, "a", with_behavior_of(trainer, make_groups()))


def test_agreement_within_the_limit_passes(make_spec, make_groups, model_dir):
    trainer = LocalTrainer(make_spec(core={"max_train_rollout_logprob_abs_diff": 1e-4}), model_dir)
    trainer.optimize(0, "a", with_behavior_of(trainer, make_groups()))


def test_wrong_index_and_wrong_size_are_refused(make_spec, make_groups, model_dir):
    trainer = LocalTrainer(make_spec(), model_dir)
    with pytest.raises(ContractViolation, match="update 1 asked for, the next is 0"):
        trainer.optimize(1, "a", make_groups())
    with pytest.raises(ContractViolation, match="12 samples"):
        trainer.optimize(0, "a", make_groups(num_groups=3))


def test_a_non_finite_gradient_leaves_the_weights(make_spec, make_groups, model_dir):
    trainer = LocalTrainer(make_spec(), model_dir)
    groups = make_groups(advantages=[[1e38, -1e38, 1e38, -1e38], [1e38, -1e38, 1e38, -1e38]])
    before = parameters(trainer)
    with pytest.raises(NonFiniteLoss):
        trainer.optimize(0, "a", groups)
    assert same(before, parameters(trainer))
    assert trainer.optimize(0, "a", make_groups()).policy_version == 1


def test_wrong_advantages_name_the_sample_and_the_group(make_spec, make_groups, model_dir):
    trainer = LocalTrainer(make_spec(), model_dir)
    groups = make_groups()
    groups[1].advantages[2] = float("nan")
    with pytest.raises(NonFiniteLoss, match="group 1, sample 6: advantage is nan"):
        trainer.optimize(0, "a", groups)
    groups = make_groups()
    groups[0].advantages = groups[0].advantages[:-1]
    with pytest.raises(ContractViolation, match="3 advantages for 4 samples"):
        trainer.optimize(0, "a", groups)


def test_a_sample_beyond_the_context_is_refused_by_name(make_spec, make_groups, model_dir):
    """A prompt of 6 and a response of 7 tokens; a kernel would compute 12 of them, in silence."""
    spec = make_spec(core={"max_policy_lag": 8, "max_context_length": 12})
    trainer = LocalTrainer(spec, model_dir)
    with pytest.raises(
        ContractViolation,
        match=r"^rank 0: prompt group 1, sample 6: prompt_token_ids and response_token_ids hold "
        r"13 tokens together, core.max_context_length is 12",
    ):
        trainer.optimize(0, "a", make_groups())
    assert trainer.policy_version == 0


def test_a_torn_update_is_lost_state(make_spec, make_groups, model_dir, monkeypatch):
    trainer = LocalTrainer(make_spec(training={"global_batch_size": 4}), model_dir)
    step = trainer._step
    calls = []

    def break_second() -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:
            raise NonFiniteLoss("planted")
        return step()

    monkeypatch.setattr(trainer, "_step", break_second)
    with pytest.raises(NonFiniteLoss, match="planted"):
        trainer.optimize(0, "a", make_groups())
    with pytest.raises(TrainerLost, match="1 of 2 optimizer steps"):
        trainer.optimize(0, "a", make_groups())


def test_learning_rate_follows_the_schedule_by_completed_steps(make_spec, make_groups, model_dir):
    spec = make_spec(
        optimizer={"learning_rate": 1e-3, "lr_warmup_steps": 4, "lr_warmup_init": 2e-4}
    )
    trainer = LocalTrainer(spec, model_dir)
    first = trainer.optimize(0, "a", make_groups(0)).metrics
    tied = trainer.optimize(1, "b", make_groups(advantages=[[0.0] * 4, [0.0] * 4])).metrics
    second = trainer.optimize(2, "c", make_groups(1)).metrics
    assert first["train/lr_used-pg_0"] == pytest.approx(2e-4)
    assert tied["train/lr-pg_0"] == pytest.approx(4e-4)
    assert second["train/lr_used-pg_0"] == pytest.approx(4e-4)


def test_description_reports_data_types_and_memory(make_spec, model_dir):
    description = LocalTrainer(make_spec(), model_dir).describe()
    assert description["master_dtype"] == "float32"
    assert description["inference_dtype"] == "float32"
    assert description["parameters"] == sum(p.numel() for p in load_model(model_dir).parameters())
    assert description["estimated_bytes"] > 16 * description["parameters"]
    assert description["resident_bytes"] > 0


def test_a_model_that_scales_its_logits_is_refused(make_spec, model_dir, monkeypatch):
    plain = load._plain_logprobs
    monkeypatch.setattr(load, "_plain_logprobs", lambda *args: plain(*args) * 0.5)
    with pytest.raises(ConfigurationError, match="cannot be trained with packed rows"):
        load_policy(make_spec(), model_dir)


def mistral(**settings):
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            **settings,
        )
    )


def test_a_window_shorter_than_the_context_is_refused(make_spec, tmp_path):
    mistral(sliding_window=16).save_pretrained(tmp_path / "windowed")
    with pytest.raises(ConfigurationError, match=r"windows of 16 tokens; core\.max_context_length"):
        load_policy(make_spec(core={"max_context_length": 17}), tmp_path / "windowed")
    load_policy(make_spec(core={"max_context_length": 16}), tmp_path / "windowed")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_capped_logits_are_refused(make_spec, tmp_path, attention):
    """Gemma 2 caps its logits after the head; it also refuses sdpa outright."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma2Config(vocab_size=100, final_logit_softcapping=0.1, **sizes, **heads)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    with pytest.raises(ConfigurationError, match=r"cannot be (trained with packed rows|loaded)"):
        load_policy(make_spec(trainer={"attention": attention}), tmp_path / "gemma")


def test_a_context_that_does_not_fit_a_micro_batch_is_refused_before_loading(make_spec, tmp_path):
    spec = make_spec(core={"max_context_length": 66}, trainer={"micro_batch_tokens": 64})
    with pytest.raises(ConfigurationError, match=r"trainer\.micro_batch_tokens = 64; raise"):
        load_policy(spec, tmp_path / "never-read")
