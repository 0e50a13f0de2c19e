"""Metrics of an update by hand: what the loss saw, advantages, where it stands."""

import math

import pytest
import torch

from models.metrics import refuse_undeclared
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan
from models.update import UpdateReport
from workers.trainers.batch import TrainingBatch
from workers.trainers.loss import LossSettings, token_loss
from workers.trainers.ranks import SingleRank
from workers.trainers.router_losses import AuxiliaryParts
from workers.trainers.tally import UpdateTally, advantage_metrics, clock_metrics

SETTINGS = LossSettings(use_tis=True, tis_clip=2.0, tis_clip_low=0.25)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def add(tally: UpdateTally, ratios: list[float], gaps: list[float], entropies: list[float]) -> None:
    """Tokens of ``ratios``, old log-prob -1, behavior -1 less the gap, advantage 1."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    new, behavior, entropy = old + t(*ratios).log(), old - t(*gaps), t(*entropies)
    parts = token_loss(new, old, behavior, torch.ones_like(old), entropy, SETTINGS)
    tally.add(parts, new=new, anchor=old, old=old, behavior=behavior, entropy=entropy)


def tallied() -> UpdateTally:
    """Four tokens in two chunks, one more chunk without any; two optimizer steps."""
    tally = UpdateTally(model_tokens=40)
    add(tally, [1.5, 0.5, 1.0], [0.0, math.log(3.0), math.log(0.5)], [1.0, 2.0, 0.0])
    add(tally, [], [], [])
    add(tally, [1.0], [math.log(0.125)], [3.0])
    tally.add_packs(2, 3)
    tally.add_packs(1, 3)
    tally.step_losses += [(0.5, 0.25, 1.0), (1.5, 0.75, 3.0)]
    tally.router_losses += [AuxiliaryParts(0.2, 0.1), AuxiliaryParts(0.4, 0.3)]
    return tally


def test_what_the_loss_saw():
    tally = tallied()
    tally.reduce(SingleRank())
    rows = tally.metrics(SETTINGS, has_routers=True)
    refuse_undeclared(rows)
    expected = {
        "train/active_response_tokens": 4,
        "train/ois": 4.0 / 4,
        "train/ess_ratio": 4.0**2 / (4 * (2.25 + 0.25 + 1 + 1)),
        "train/ppo_kl": -(math.log(1.5) + math.log(0.5)) / 4,
        "train/pg_clipfrac": 1 / 4,
        "train/entropy_loss": 6.0 / 4,
        "train/tis": (1 + 3 + 0.5 + 0.125) / 4,
        "train/tis_abs": (0 + 2 + 0.5 + 0.875) / 4,
        "train/tis_clipfrac": 2 / 4,
        "train/train_rollout_logprob_abs_diff": math.log(3 * 2 * 8) / 4,
        "train/train_rollout_kl": -math.log(3 * 0.5 * 0.125) / 4,
        "train/policy_objective": 1.0,
        "train/pg_loss": 0.5,
        "train/auxiliary_load_balancing": 0.3,
        "train/auxiliary_router_z": 0.2,
        "train/loss": 1.0 + 0.3 + 0.2,
        "train/model_tokens": 40,
        "train/packing/packs_per_rank": 3,
        "train/packing/samples_per_pack": 2,
        "train/packing/tokens_per_pack": 40 / 3,
    }
    assert rows == pytest.approx(expected, abs=1e-12)


def test_two_ranks_with_the_same_tokens_have_the_same_means():
    class Twice(SingleRank):
        world = 2

        def all_reduce_sum(self, values):
            return 2 * values

    alone, both = tallied(), tallied()
    alone.reduce(SingleRank())
    both.reduce(Twice())
    one = alone.metrics(SETTINGS, has_routers=True)
    two = both.metrics(SETTINGS, has_routers=True)
    sums = ("loss", "policy_objective", "pg_loss", "model_tokens", "active_response_tokens")
    sums += ("auxiliary_load_balancing", "auxiliary_router_z")
    for name in sums:
        assert two.pop(f"train/{name}") == pytest.approx(2 * one.pop(f"train/{name}"))
    assert two == pytest.approx(one)


def test_terms_that_are_off_are_not_reported():
    rows = tallied().metrics(LossSettings(), has_routers=False)
    assert not [n for n in rows if "tis" in n or "auxiliary" in n or "kl_loss" in n]
    assert tallied().metrics(LossSettings(kl_coef=0.1), has_routers=False)["train/kl_loss"] == 2.0


def batch_of(advantages: list[float]) -> TrainingBatch:
    samples = [
        Sample(index, 0, [1], [5] * (index + 1), [-1.0] * (index + 1), [span], FinishReason.STOP)
        for index in range(len(advantages))
        for span in (TokenSpan(0, 0, index + 1),)
    ]
    return TrainingBatch.of([SampleGroup(0, "p", 0, samples, advantages)])


def test_advantages_count_by_response_not_by_token():
    found = advantage_metrics(batch_of([0.75, -0.25, -0.25, -0.25]))
    refuse_undeclared(found)
    assert found == {
        "advantages/max": 0.75,
        "advantages/min": -0.25,
        "advantages/max_abs": 0.75,
        "advantages/top_response_share": 0.5,
        "train/mixed_reward_groups": 1.0,
    }
    assert advantage_metrics(batch_of([0.25, -0.75]))["advantages/top_response_share"] == 0.75
    tied = advantage_metrics(batch_of([0.0, 0.0]))
    assert (tied["advantages/top_response_share"], tied["train/mixed_reward_groups"]) == (0.0, 0.0)


def test_an_update_stands_at_its_completed_steps_less_one():
    report = UpdateReport(
        update=3,
        batch_sha256="a",
        policy_version=8,
        optimizer_steps=2,
        no_signal=False,
        seconds=1.5,
        resident_bytes=100,
    )
    rows = clock_metrics(report, lag=4, published_step=6)
    refuse_undeclared(rows)
    assert rows == {
        "train/step": 7.0,
        "train/completed_steps": 8.0,
        "train/rollout_id": 3.0,
        "train/optimizer_steps": 2.0,
        "train/no_signal": 0.0,
        "train/published_step": 6.0,
        "train/lag": 4.0,
        "train/step_seconds": 1.5,
        "train/resident_bytes": 100.0,
    }
