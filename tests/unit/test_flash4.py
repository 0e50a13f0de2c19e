"""The operators around the FlashAttention-4 kernels, with kernels by the formula in their place."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.trainers import flash4
from workers.trainers.varlen_attention import Bounds, attend

LENGTHS = (3, 1, 5)
CPU = torch.device("cpu")


def by_formula(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Document by document: softmax(q k' scale, earlier tokens only) v, and its normalizers."""
    group = query.shape[1] // key.shape[1]
    outputs, normalizers = [], []
    for q, k, v in zip(*(part.split(LENGTHS) for part in (query, key, value)), strict=True):
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        outputs.append(torch.einsum("hts,shd->thd", scores.softmax(-1), v))
        normalizers.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(normalizers, 1).float()


def forward(query: Tensor, key: Tensor, value: Tensor, **told: Any) -> tuple[Any, ...]:
    """As the package answers: output, normalizers, and more that is not looked at."""
    assert query.shape[-1] % 32 == 0, "a size of head that Hopper's kernels take"
    assert told["causal"]
    assert told["return_lse"]
    assert told["cu_seqlens_q"].tolist() == [0, 3, 4, 9]
    return (*by_formula(query, key, value, told["softmax_scale"]), None, None, None)


def backward(*given: Tensor, **told: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key and value by the formulas of softmax; an operator knows no graph."""
    scale, done = told["softmax_scale"], []
    query, key, value, _, gradient, _ = given
    group = query.shape[1] // key.shape[1]
    cut = (part.split(LENGTHS) for part in (query, key, value, gradient))
    for q, k, v, d in zip(*cut, strict=True):
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        p = scores.masked_fill(later, -torch.inf).softmax(-1)
        by_value = torch.einsum("thd,shd->hts", d, v)
        by_score = p * (by_value - (p * by_value).sum(-1, keepdim=True)) * scale
        dq = torch.einsum("hts,shd->thd", by_score, k)
        dk, dv = (
            torch.einsum("hts,thd->shd", left, right).unflatten(1, (-1, group)).sum(2)
            for left, right in ((by_score, q), (p, d))
        )
        done.append((dq, dk, dv))
    return tuple(torch.cat(parts) for parts in zip(*done, strict=True))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setattr(flash4, "_kernels", lambda: stand_in)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("scale", "size"), [(None, 8), (0.3, 8), (None, 32)])
def test_gradients_pass_the_operators(compiled: bool, scale: float | None, size: int) -> None:
    torch.manual_seed(0)
    shapes = [(9, 4, size), (9, 2, size), (9, 2, size)]
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    gradient = torch.randn(shapes[0], dtype=torch.float64)
    bounds = Bounds.of(LENGTHS, CPU)

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(2 * query, key, value, bounds, scale, "flash4")

    run: Any = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    found = run(*leaves)
    used = size**-0.5 if scale is None else scale
    expected = by_formula(2 * leaves[0], leaves[1], leaves[2], used)[0]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, gradient),
        torch.autograd.grad(expected, leaves, gradient),
    )


def test_a_machine_without_such_a_gpu_is_told() -> None:
    assert "Hopper" in (flash4.missing(CPU) or "")
