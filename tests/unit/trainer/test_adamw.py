"""The optimizer's step by parts of parameters is torch's own."""

import pytest
import torch
from torch import nn

from configs.training import OptimizerSection
from workers.trainers.adamw import build_optimizer, take_step


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_step_is_that_of_torch(decay):
    section = OptimizerSection(learning_rate=1e-2, weight_decay=decay)
    torch.manual_seed(0)
    start = [torch.randn(size) for size in ((3, 4), (5,), (0, 2))]
    sides = [[nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2)]
    ours, theirs = (build_optimizer(side, section) for side in sides)
    for _ in range(3):
        for pair in zip(*sides, strict=True):
            given = torch.randn_like(pair[0])
            for parameter in pair:
                parameter.grad = given.clone()
        take_step(ours)
        theirs.step()
    for own, other, before in zip(*sides, start, strict=True):
        assert torch.equal(own, other)
        assert not len(before) or not torch.equal(own, before)
        assert ours.state[own].keys() == theirs.state[other].keys()
        for key, value in theirs.state[other].items():
            assert torch.equal(ours.state[own][key], value)
