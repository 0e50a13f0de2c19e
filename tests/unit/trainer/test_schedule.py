"""Learning-rate schedules at points computed by hand."""

import math

import pytest

from models.errors import ConfigurationError
from workers.trainers.schedule import LearningRate


def test_warm_up_is_linear_and_reaches_the_peak_at_its_last_step():
    rate = LearningRate("constant", peak=1.0, floor=0.0, warmup_steps=4, total_steps=10)
    assert [rate.at(s) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_ends_at_the_floor():
    rate = LearningRate("linear", peak=1.0, floor=0.2, warmup_steps=0, total_steps=4)
    assert [rate.at(s) for s in (0, 2, 4, 9)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_cosine_decay_is_halfway_in_the_middle():
    rate = LearningRate("cosine", peak=2.0, floor=0.0, warmup_steps=2, total_steps=6)
    assert rate.at(2) == pytest.approx(2.0)
    assert rate.at(3) == pytest.approx(1 + math.cos(math.pi / 4))
    assert rate.at(4) == pytest.approx(1.0)
    assert rate.at(6) == pytest.approx(0.0)


def test_inverse_square_root_decays_from_the_warm_up_on():
    rate = LearningRate("inverse-square-root", 1.0, 0.3, warmup_steps=4, total_steps=100)
    assert rate.at(4) == pytest.approx(1.0)
    assert rate.at(16) == pytest.approx(0.5)
    assert rate.at(400) == pytest.approx(0.3)


def test_floor_above_peak_is_refused():
    with pytest.raises(ConfigurationError, match="min_lr"):
        LearningRate("constant", peak=1.0, floor=2.0, warmup_steps=0, total_steps=1)


def test_warm_up_must_end_before_the_decay():
    with pytest.raises(ConfigurationError, match="lr_warmup_steps 5"):
        LearningRate("cosine", peak=1.0, floor=0.0, warmup_steps=5, total_steps=5)
