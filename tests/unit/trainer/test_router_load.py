"""Router load: worked values of counts, and a brute-force reference."""

import math
import statistics

import pytest
import torch

from models.errors import ContractViolation
from models.metrics import refuse_undeclared
from workers.trainers.ranks import SingleRank
from workers.trainers.router_load import expert_balance, router_load


def load(counts, ep=1):
    counts = torch.tensor(counts)
    return router_load(counts, [f"layer {i}" for i in range(counts.shape[1])], ep)


def test_two_replicas_of_two_ranks():
    found = load([[[4, 0]], [[4, 0]], [[0, 4]], [[0, 4]]], ep=2)
    assert found["replicas"] == 2
    assert found["summary"] == {
        "moe/max_expert_load": 8,
        "moe/dead_experts": 0,
        "moe/dead_experts_max_per_layer": 0,
        "moe/load_cv_mean": 0.0,
        "moe/load_cv_max": 0.0,
        "moe/max_mean_load_ratio": 1.0,
        "moe/replica_load_cv_max": 1.0,
        "moe/replica_max_mean_load_ratio": 2.0,
        "moe/replica_dead_experts_max_per_layer": 1,
    }
    assert found["layers"]["layer 0"]["assignments"] == 16


def test_an_empty_layer_has_no_variation_and_dead_experts_only():
    found = load([[[4, 0], [0, 4], [0, 0]]])
    summary = found["summary"]
    assert (summary["moe/dead_experts"], summary["moe/dead_experts_max_per_layer"]) == (4, 2)
    assert summary["moe/load_cv_mean"] == pytest.approx(2 / 3, abs=1e-15)
    assert found["layers"]["layer 2"] == {
        "assignments": 0,
        "experts": 2,
        "max_expert_load": 0,
        "dead_experts": 2,
        "max_mean_load_ratio": 0.0,
        "load_cv": 0.0,
    }


@pytest.mark.parametrize(
    ("counts", "largest", "dead", "variation", "ratio"),
    [
        ([5, 0, 1], 5, 1, math.sqrt(14 / 3) / 2, 2.5),
        ([3, 1, 0, 0], 3, 2, 1.5**0.5, 3.0),
        ([2, 2], 2, 0, 0.0, 1.0),
    ],
)
def test_one_layer(counts, largest, dead, variation, ratio):
    (layer,) = load([[counts]])["layers"].values()
    assert (layer["max_expert_load"], layer["dead_experts"]) == (largest, dead)
    assert layer["load_cv"] == pytest.approx(variation, abs=1e-14)
    assert layer["max_mean_load_ratio"] == ratio


@pytest.mark.parametrize(
    ("counts", "ep", "says"),
    [
        ([[[1, 1]]] * 3, 2, "3 ranks cannot be dealt to replicas of 2"),
        ([[[1, 1]]], 0, "replicas of 0"),
        ([[[1, -1]]], 1, "negative number"),
    ],
)
def test_counts_that_cannot_be_are_refused(counts, ep, says):
    with pytest.raises(ContractViolation, match=says):
        load(counts, ep)


@pytest.mark.parametrize("ep", [1, 2, 3, 6])
def test_random_counts_equal_a_brute_force_reference(ep):
    generator = torch.Generator().manual_seed(ep)
    counts = torch.randint(0, 4, (6, 5, 7), generator=generator)
    ranks = counts.tolist()
    replicas = [
        [[sum(rank[layer][e] for rank in part) for e in range(7)] for layer in range(5)]
        for part in (ranks[i : i + ep] for i in range(0, 6, ep))
    ]
    whole = [[sum(r[layer][e] for r in replicas) for e in range(7)] for layer in range(5)]
    flat = [loads for replica in replicas for loads in replica]

    def variation(loads):
        return statistics.pstdev(loads) / statistics.fmean(loads)

    def ratio(loads):
        return max(loads) / statistics.fmean(loads)

    expected = {
        "moe/max_expert_load": max(map(max, whole)),
        "moe/dead_experts": sum(loads.count(0) for loads in whole),
        "moe/dead_experts_max_per_layer": max(loads.count(0) for loads in whole),
        "moe/load_cv_mean": statistics.fmean(map(variation, whole)),
        "moe/load_cv_max": max(map(variation, whole)),
        "moe/max_mean_load_ratio": max(map(ratio, whole)),
        "moe/replica_load_cv_max": max(map(variation, flat)),
        "moe/replica_max_mean_load_ratio": max(map(ratio, flat)),
        "moe/replica_dead_experts_max_per_layer": max(loads.count(0) for loads in flat),
    }
    found = load(counts.tolist(), ep)
    assert found["replicas"] == 6 // ep
    assert found["summary"] == pytest.approx(expected, abs=1e-12)
    assert sum(layer["assignments"] for layer in found["layers"].values()) == counts.sum()


def test_every_key_is_a_declared_metric():
    refuse_undeclared(f"train/{key}" for key in load([[[1, 2]]])["summary"])


class Together(SingleRank):
    """One of several ranks whose counts of packs are known; the others have ``others``."""

    def __init__(self, others):
        self.world = 1 + len(others)
        self._others = [Recorded() for _ in others]
        for rank, (packs, micros) in zip(self._others, others, strict=True):
            expert_balance(packs, micros, rank)

    def all_reduce_sum(self, values):
        return values + sum(rank.summed for rank in self._others)

    def all_reduce_max(self, values):
        return torch.stack([values, *(rank.maximized for rank in self._others)]).amax(0)


class Recorded(SingleRank):
    """Keeps what it was asked to reduce."""

    def all_reduce_sum(self, values):
        self.summed = values
        return values

    def all_reduce_max(self, values):
        self.maximized = values
        return values


def test_balance_of_two_packs_by_hand():
    """Busiest over mean: (3 + 2) / (2 + 2) and (4 + 2) / (2 + 1)."""
    packs = torch.tensor([[[3, 1], [2, 2]], [[4, 0], [2, 0]]])
    assert expert_balance(packs, 2, SingleRank()) == {
        "packs_per_rank": 2,
        "dispatches": 2,
        "slots": 2,
        "skew_mean": (5 / 4 + 2) / 2,
        "skew_max": 2.0,
        "max_slot_assignments": 4,
        "critical_work_proxy": 3 + 2 + 4 + 2,
    }


def test_even_packs_have_skew_one():
    balance = expert_balance(torch.full((3, 2, 5), 7), 3, SingleRank())
    assert (balance["skew_mean"], balance["skew_max"]) == (1.0, 1.0)


def test_fillers_of_a_rank_are_no_dispatches():
    """One rank has two packs, the other one and a filler, a third fillers only."""
    first = torch.tensor([[[3, 1]], [[1, 1]]])
    second = torch.tensor([[[0, 6]]])
    nothing = torch.zeros(0, 1, 2, dtype=torch.long)
    expected = {
        "packs_per_rank": 2,
        "dispatches": 3,
        "slots": 2,
        "skew_mean": (1.5 + 1.0 + 2.0) / 3,
        "skew_max": 2.0,
        "max_slot_assignments": 6,
        "critical_work_proxy": 6 + 1,
    }
    every = [(first, 2), (second, 2), (nothing, 2)]
    for own in range(3):
        others = [rank for place, rank in enumerate(every) if place != own]
        assert expert_balance(*every[own], Together(others)) == pytest.approx(expected)
