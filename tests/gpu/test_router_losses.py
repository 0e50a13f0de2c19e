"""Auxiliary losses of routers on a GPU: the values of a CPU, and no wait within a micro-batch."""

import pytest
import torch

from tests.support.cuda_waits import no_waits
from workers.trainers.router_losses import Routed, RouterLosses, RouterObjective

pytestmark = pytest.mark.gpu

LENGTHS = (700, 13, 300)


@pytest.mark.parametrize("grouping", ["pack", "sequence"])
@pytest.mark.parametrize("count_source", ["executed", "router_selected"])
def test_a_pack_equals_that_of_a_cpu_without_waiting(grouping, count_source):
    objective = RouterObjective(0.3, 0.02, grouping, "response", "token", count_source)
    generator = torch.Generator().manual_seed(2)
    # No two experts of a token alike in bfloat16: devices choose among equals as they like.
    places = torch.rand(2, sum(LENGTHS), 64, generator=generator).argsort(-1)
    logits = ((places - 31.5) / 16).bfloat16()
    chosen = torch.rand(2, sum(LENGTHS), 64, generator=generator).topk(8).indices
    exact = logits.double().requires_grad_()
    expected = RouterLosses(objective, 2000, 5)
    plain = [Routed(*layer) for layer in zip(exact, chosen, strict=True)]
    expected.of_pack(plain, LENGTHS).backward()
    on_gpu = logits.cuda().requires_grad_()
    layers = [Routed(*layer) for layer in zip(on_gpu, chosen.cuda(), strict=True)]
    losses = RouterLosses(objective, 2000, 5)
    losses.of_pack(layers, LENGTHS).backward()  # kernels are loaded
    on_gpu.grad = None
    losses = RouterLosses(objective, 2000, 5)
    with no_waits():
        losses.of_pack(layers, LENGTHS).backward()
    assert losses.finish() == pytest.approx(expected.finish(), rel=1e-5)
    gap = (on_gpu.grad.cpu().double() - exact.grad).abs().max()
    assert gap <= 0.01 * exact.grad.abs().max()  # gradients of bfloat16 logits are bfloat16
