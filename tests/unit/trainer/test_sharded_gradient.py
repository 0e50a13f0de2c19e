"""Loss and gradient of two ranks against plain autograd on padded full logits, in float64.

The second rank has fewer micro-batches than the first and computes fillers.
"""

import pytest
import torch
from rank_cases import gatherings, gradient
from step_reference import Reference, spread
from torch import nn

from workers.trainers.batch import TrainingBatch
from workers.trainers.loss import LossSettings
from workers.trainers.sharded import _units

TOLERANCE = 2e-7
pytestmark = pytest.mark.timeout(200)  # processes start for the first test


@pytest.fixture
def folders(tmp_path, make_model):
    """A model and a frozen one off it, per family: tied embeddings (qwen3) and a head (llama)."""

    def make(family):
        model, frozen = make_model(family), make_model(family)
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for parameter in frozen.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        for name, saved in ((family, model), (f"{family}-frozen", frozen)):
            saved.save_pretrained(tmp_path / name)
        return model.double(), frozen.double(), tmp_path / family, tmp_path / f"{family}-frozen"

    return make


@pytest.mark.parametrize("aggregation", ["response", "token"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(
    ("family", "packed", "extra"),
    [
        ("qwen3", True, {}),
        ("qwen3", False, {"entropy_coef": 0.02, "kl_coef": 0.03, "kl_type": "k3"}),
        ("llama", True, {"entropy_coef": 0.02, "kl_coef": 0.03, "kl_type": "k3"}),
        ("llama", False, {"sequence_ratio": True, "eps_clip": 0.05, "eps_clip_high": 0.06}),
    ],
)
def test_two_ranks_equal_the_reference(
    two_ranks, folders, make_groups, aggregation, count, family, packed, extra
):
    model, frozen, model_dir, frozen_dir = folders(family)
    settings = LossSettings(use_tis=True, **extra)
    groups = spread(make_groups())
    batch = TrainingBatch.of(groups)
    reference = Reference(groups, model)
    # behavior log-probs and advantages are float32 in a batch
    reference.behavior = reference.padded(batch.behavior.double())
    reference.advantages = reference.advantages.float().double()
    old = None
    if count != 2:  # else the training forward supplies them
        with torch.no_grad():
            own = reference.score(model)[0][reference.mask]
        noise = torch.randn(len(own), generator=torch.Generator().manual_seed(1))
        old = own + 0.3 * noise.double()
    expected = reference.loss(settings, aggregation, old, frozen)
    expected.backward()

    answers = two_ranks.run(
        gradient,
        model_dir,
        frozen_dir if settings.kl_coef else None,
        groups,
        settings,
        aggregation,
        None if old is None else old.numpy(),
        packed,
        count,
    )

    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    assert max(abs(g).max() for g in gradients.values()) > 1e-2
    for total, found in answers:
        assert total == pytest.approx(float(expected.detach()), abs=TOLERANCE)
        assert found.keys() == gradients.keys()
        for name, values in gradients.items():
            assert abs(found[name] - values).max() <= TOLERANCE, name


@pytest.mark.parametrize("stay", [True, False])
def test_blocks_that_stay_are_gathered_once(two_ranks, folders, make_groups, stay):
    """Small ones together. Nothing is left gathered for an export or the next step to find."""
    model, _, model_dir, _ = folders("qwen3")
    blocks = len(model.base_model.layers)
    expected = (1 + 1, 1 + 1, 0) if stay else (1 + 2 * blocks, 1 + blocks, 0)  # 1: all the rest
    for answer in two_ranks.run(gatherings, model_dir, make_groups(), stay):
        assert answer == expected


def test_blocks_are_gathered_by_size():
    sizes = [3, 3, 3, 8, 1]
    blocks = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in sizes)
    found = [[block.in_features for block in unit] for unit in _units(blocks, 6)]
    assert found == [[3, 3], [3, 8], [1]]
    assert [len(unit) for unit in _units(blocks, 0)] == [1] * 5
