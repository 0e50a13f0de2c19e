"""Learning-rate schedules at points computed by hand."""

import math

import pytest

from models.errors import ConfigurationError, NonFiniteLoss
from workers.trainers.schedule import LearningRate


def test_warm_up_is_linear_from_its_first_rate_to_the_peak():
    rate = LearningRate(peak=1.0, warmup_steps=4, decay_steps=10)
    assert [rate.at(s) for s in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    rate = LearningRate(peak=1.0, warmup_init=0.2, warmup_steps=4, decay_steps=10)
    assert [rate.at(s) for s in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_without_a_warm_up_the_first_step_is_at_the_peak():
    rate = LearningRate(peak=0.5, decay_steps=3)
    assert [rate.at(s) for s in range(5)] == [0.5] * 5


def test_linear_decay_ends_at_the_floor():
    rate = LearningRate(shape="linear", peak=1.0, floor=0.2, decay_steps=4)
    assert [rate.at(s) for s in (0, 2, 4, 9)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_linear_decay_begins_after_the_warm_up():
    rate = LearningRate(shape="linear", peak=1.0, warmup_steps=2, decay_steps=6)
    expected = [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [rate.at(s) for s in range(8)] == pytest.approx(expected)


def test_cosine_decay_is_halfway_in_the_middle():
    rate = LearningRate(shape="cosine", peak=2.0, warmup_steps=2, decay_steps=6)
    assert rate.at(2) == pytest.approx(2.0)
    assert rate.at(3) == pytest.approx(1 + math.sqrt(0.5))
    assert rate.at(4) == pytest.approx(1.0)
    assert rate.at(6) == pytest.approx(0.0)
    assert rate.at(7) == 0.0


def test_inverse_square_root_decays_from_the_warm_up_on():
    rate = LearningRate(
        shape="inverse-square-root", peak=1.0, floor=0.3, warmup_steps=4, decay_steps=100
    )
    assert rate.at(4) == pytest.approx(1.0)
    assert rate.at(16) == pytest.approx(0.5)
    assert rate.at(100) == pytest.approx(0.3)  # 0.2 without the floor
    rate = LearningRate(shape="inverse-square-root", peak=1.0, floor=0.1, decay_steps=25)
    assert [rate.at(s) for s in (0, 1, 4, 25, 26)] == pytest.approx([1.0, 1.0, 0.5, 0.2, 0.1])


@pytest.mark.parametrize(
    ("style", "shares"),
    [
        ("linear", [0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0]),
        ("exponential", [0.681793, 0.414214, 0.189207, 0.0]),  # 2 * 2^-0.25 - 1 and so on
        ("minus_sqrt", [0.5, 0.292893, 0.133975, 0.0]),
    ],
)
def test_warm_up_stable_decay(style, shares):
    rate = LearningRate(
        shape="WSD",
        peak=3.0,
        floor=1.0,
        warmup_init=1.0,
        warmup_steps=2,
        decay_steps=10,
        wsd_decay_steps=4,
        wsd_shape=style,
    )
    assert [rate.at(s) for s in range(7)] == [1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    expected = [1.0 + 2.0 * share for share in shares]
    assert [rate.at(s) for s in range(7, 11)] == pytest.approx(expected, abs=2e-6)
    assert rate.at(11) == 1.0


def test_the_run_is_the_decay_unless_the_file_says_otherwise(make_spec):
    shape = {"lr_schedule": "linear", "learning_rate": 1.0}
    batch = {"global_batch_size": 4}  # two steps an update, four updates
    assert LearningRate.of(make_spec(optimizer=shape, training=batch)).at(4) == 0.5
    short = make_spec(optimizer={**shape, "lr_decay_steps": 4}, training=batch)
    assert [LearningRate.of(short).at(s) for s in (2, 4, 6)] == [0.5, 0.0, 0.0]
    wsd = {"lr_schedule": "WSD", "lr_wsd_decay_steps": 2, "lr_wsd_decay_style": "linear"}
    assert [LearningRate.of(make_spec(optimizer={**shape, **wsd})).at(s) for s in range(5)] == [
        *(1.0, 1.0, 1.0, 0.5, 0.0)
    ]


@pytest.mark.parametrize("key", ["min_lr", "lr_warmup_init"])
def test_rates_above_the_peak_are_refused(key):
    name = {"min_lr": "floor", "lr_warmup_init": "warmup_init"}[key]
    with pytest.raises(ConfigurationError, match=key):
        LearningRate(peak=1.0, decay_steps=1, **{name: 2.0})


def test_warm_up_must_end_before_the_decay():
    with pytest.raises(ConfigurationError, match="lr_warmup_steps 5"):
        LearningRate(shape="cosine", peak=1.0, warmup_steps=5, decay_steps=5)


@pytest.mark.parametrize("steps", [0, 4])
def test_the_final_decay_must_fit_after_the_warm_up(steps):
    with pytest.raises(ConfigurationError, match=r"lr_wsd_decay_steps \d must be in 1\.\.3"):
        LearningRate(shape="WSD", peak=1.0, warmup_steps=2, decay_steps=5, wsd_decay_steps=steps)


def test_a_rate_that_is_no_number_is_refused():
    with pytest.raises(NonFiniteLoss, match="the learning rate after 3 steps is nan"):
        LearningRate(peak=math.nan, decay_steps=9).at(3)
