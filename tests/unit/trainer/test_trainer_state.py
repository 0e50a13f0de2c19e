"""Save, load, resume: bit for bit, and without pickle."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from activities.storage import atomic
from models.checkpoint import PolicyClock
from models.errors import ContractViolation
from workers.trainers.local import LocalTrainer
from workers.trainers.state import TrainerState, read_state, write_state


def bits(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def train(trainer: LocalTrainer, make_groups, updates) -> list:
    return [trainer.optimize(u, f"digest-{u}", make_groups(u)) for u in updates]


def test_four_updates_equal_two_a_restart_and_two(make_spec, make_groups, model_dir, tmp_path):
    spec = make_spec(training={"global_batch_size": 4}, optimizer={"lr_schedule": "cosine"})
    whole = LocalTrainer(spec, model_dir)
    reports = train(whole, make_groups, range(4))

    first = LocalTrainer(spec, model_dir)
    train(first, make_groups, range(2))
    first.save(tmp_path / "checkpoint")
    second = LocalTrainer(spec, model_dir)
    second.load(
        tmp_path / "checkpoint",
        PolicyClock(completed_steps=4, published_step=2, next_rollout_id=2),
    )
    assert second.last_report == first.last_report
    resumed = train(second, make_groups, range(2, 4))

    left, right = bits(whole), bits(second)
    assert all(torch.equal(left[name], right[name]) for name in left)
    for ours, theirs in zip(reports[2:], resumed, strict=True):
        assert ours.policy_version == theirs.policy_version
        for key in (
            "train/loss",
            "train/grad_norm",
            "train/lr_used-pg_0",
            "train/parameter_change",
        ):
            assert ours.metrics[key] == theirs.metrics[key]


def test_files_are_safetensors_and_json_with_true_digests(
    make_spec, make_groups, model_dir, tmp_path
):
    trainer = LocalTrainer(make_spec(), model_dir)
    train(trainer, make_groups, range(1))
    files = trainer.save(tmp_path / "checkpoint")
    assert sorted(f.path for f in files) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    for file in files:
        data = (tmp_path / "checkpoint" / file.path).read_bytes()
        assert hashlib.sha256(data).hexdigest() == file.sha256
        assert len(data) == file.num_bytes
    weights = load_file(tmp_path / "checkpoint" / "model.safetensors")
    own = bits(trainer)
    assert weights.keys() == own.keys()
    assert all(torch.equal(weights[name], own[name]) for name in own)
    moments = load_file(tmp_path / "checkpoint" / "optimizer.safetensors")
    assert moments["step.model.norm.weight"].item() == 1.0
    assert moments["exp_avg.model.norm.weight"].shape == own["model.norm.weight"].shape
    state = json.loads((tmp_path / "checkpoint" / "state.json").read_text())
    assert state["last_report"]["batch_sha256"] == "digest-0"
    assert state["clock"] == {"completed_steps": 1, "published_step": -1, "next_rollout_id": 1}


def test_a_trainer_that_never_stepped_can_be_saved(make_spec, model_dir, tmp_path):
    LocalTrainer(make_spec(), model_dir).save(tmp_path / "checkpoint")
    restored = LocalTrainer(make_spec(), model_dir)
    restored.load(
        tmp_path / "checkpoint",
        PolicyClock(completed_steps=0, published_step=-1, next_rollout_id=0),
    )
    assert (restored.policy_version, restored.next_update) == (0, 0)


def test_another_clock_is_refused(make_spec, make_groups, model_dir, tmp_path):
    trainer = LocalTrainer(make_spec(), model_dir)
    train(trainer, make_groups, range(1))
    trainer.save(tmp_path / "checkpoint")
    clock = PolicyClock(completed_steps=2, published_step=0, next_rollout_id=2)
    with pytest.raises(ContractViolation, match=r"\(1, 1\).*\(2, 2\)"):
        LocalTrainer(make_spec(), model_dir).load(tmp_path / "checkpoint", clock)


def test_a_checkpoint_of_another_model_is_refused(make_spec, model_dir, make_model, tmp_path):
    LocalTrainer(make_spec(), model_dir).save(tmp_path / "checkpoint")
    make_model("llama").save_pretrained(tmp_path / "other")
    clock = PolicyClock(completed_steps=0, published_step=-1, next_rollout_id=0)
    with pytest.raises(ContractViolation, match="does not fit this model"):
        LocalTrainer(make_spec(), tmp_path / "other").load(tmp_path / "checkpoint", clock)


def test_a_missing_file_is_named(make_spec, model_dir, tmp_path):
    trainer = LocalTrainer(make_spec(), model_dir)
    trainer.save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "optimizer.safetensors").unlink()
    clock = PolicyClock(completed_steps=0, published_step=-1, next_rollout_id=0)
    with pytest.raises(ContractViolation, match=r"lacks optimizer\.safetensors"):
        trainer.load(tmp_path / "checkpoint", clock)


def test_a_parameter_that_never_had_a_gradient_is_restored_without_moments(tmp_path):
    def make() -> tuple[nn.ModuleDict, torch.optim.AdamW]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(3, 2), "idle": nn.Linear(3, 2)})
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = make()
    model["used"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    clock = PolicyClock(completed_steps=1, published_step=0, next_rollout_id=1)
    write_state(tmp_path / "c", model, optimizer, TrainerState(clock=clock))

    again, restored = make()
    read_state(tmp_path / "c", again, restored)
    assert set(restored.state) == set(again["used"].parameters())
    assert restored.state[again["used"].weight]["step"] == 1
    assert torch.equal(
        restored.state[again["used"].weight]["exp_avg"],
        optimizer.state[model["used"].weight]["exp_avg"],
    )


def test_the_new_folder_itself_is_flushed(make_spec, model_dir, tmp_path, monkeypatch):
    synced = []
    real = atomic.sync_folder
    monkeypatch.setattr(atomic, "sync_folder", lambda path: (synced.append(path), real(path)))
    LocalTrainer(make_spec(), model_dir).save(tmp_path / "core" / "checkpoint")
    assert synced == [tmp_path, tmp_path / "core"]
