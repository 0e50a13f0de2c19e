"""The kernel for documents on a GPU against attention by its formula in float64.

Bounds: u is the unit roundoff, 2^-9 in bfloat16 and 2^-12 in float16. Inputs are exact. An output
passes two roundings on its way (probabilities, result), a gradient four (probabilities, the output
inside the score's gradient, that gradient, result); each adds at most u relative to the norm. The
gradient of a short document is a difference of nearly equal terms and has no such bound of its own:
a document may have four times its tokens' share of the error that all documents together may have.
"""

import random
from itertools import pairwise

import pytest
import torch

from tests.support.cuda_waits import no_waits
from workers.trainers import flash4
from workers.trainers.varlen_attention import Bounds, attend, kernel_dtype

pytestmark = [
    pytest.mark.gpu,
    # of the compiler of FlashAttention-4, of a part of its kernels that is not used here
    pytest.mark.filterwarnings("ignore:Argument .* cannot be converted:UserWarning"),
    # of its kernels, which ask that compiler for names that it has moved
    pytest.mark.filterwarnings("ignore:.* is deprecated[,;] use cut:DeprecationWarning"),
]

GPU = torch.device("cuda")
ROUNDOFF = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@pytest.fixture(params=["torch", "flash4"])
def kernel(request):
    """The name of each kernel that can be used here."""
    why = flash4.missing(GPU) if request.param == "flash4" else None
    if why:
        pytest.skip(why)
    return request.param


def random_lengths(seed):
    """Of 12 documents, three of them of one token."""
    rng = random.Random(seed)
    lengths = [1, 1, 1, 2, 63, 64, 65, 128, *(rng.randrange(3, 900) for _ in range(4))]
    rng.shuffle(lengths)
    return lengths


def random_layer(lengths, dtype, heads, key_heads, size):
    """Query, key, value and the gradient of the output."""
    tokens = sum(lengths)
    shapes = [(tokens, n, size) for n in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, device=GPU, dtype=dtype) for shape in shapes]


def by_formula(query, key, value, lengths, scale):
    """Document by document: softmax(q k' scale, earlier tokens only) v."""
    group = query.shape[1] // key.shape[1]
    done = []
    for q, k, v in zip(*(part.split(lengths) for part in (query, key, value)), strict=True):
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=GPU).triu(1)
        done.append(
            torch.einsum("hts,shd->thd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
        )
    return torch.cat(done)


def output_and_gradients(attention, inputs, gradient):
    """Of ``attention`` at ``inputs``: [output, dq, dk, dv]."""
    leaves = [part.detach().requires_grad_() for part in inputs]
    output = attention(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
@pytest.mark.parametrize(
    ("heads", "key_heads", "size"), [(4, 4, 64), (8, 2, 128), (6, 3, 40), (4, 2, 80)]
)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_output_and_gradients_are_those_of_the_formula(
    kernel, dtype, heads, key_heads, size, scale
):
    torch.manual_seed(heads)
    lengths = random_lengths(heads)
    *inputs, gradient = random_layer(lengths, dtype, heads, key_heads, size)
    bounds = Bounds.of(lengths, GPU)
    found = output_and_gradients(lambda *p: attend(*p, bounds, scale, kernel), inputs, gradient)
    exact = [part.double() for part in inputs]
    used = size**-0.5 if scale is None else scale
    expected = output_and_gradients(
        lambda *p: by_formula(*p, lengths, used), exact, gradient.double()
    )
    for name, got, want, roundings in zip("oqkv", found, expected, (2, 4, 4, 4), strict=True):
        assert got.dtype == dtype
        bound = roundings * ROUNDOFF[dtype]
        assert (got - want).norm() <= bound * want.norm(), name
        for part, right in zip(got.split(lengths), want.split(lengths), strict=True):
            room = 4 * bound * want.norm() * (len(part) / len(want)) ** 0.5
            assert (part - right).norm() <= room, (name, len(part))


def test_documents_do_not_see_each_other(kernel):
    torch.manual_seed(1)
    lengths = random_lengths(1)
    *inputs, gradient = random_layer(lengths, torch.bfloat16, 8, 2, 128)
    bounds = Bounds.of(lengths, GPU)
    places = list(pairwise(bounds.offsets.tolist()))
    first, end = places[5]
    before = attend(*inputs, bounds, None, kernel)
    changed = [part.clone() for part in inputs]
    for part in changed:
        part[first:end] = torch.randn_like(part[first:end])
    after = attend(*changed, bounds, None, kernel)
    others = torch.ones(len(gradient), dtype=torch.bool, device=GPU)
    others[first:end] = False
    assert torch.equal(before[others], after[others])
    gradient[others] = 0
    found = output_and_gradients(lambda *p: attend(*p, bounds, None, kernel), inputs, gradient)
    for part in found[1:]:
        assert not part[others].any()
        assert part[first:end].any()


def test_no_layer_waits_for_the_gpu(kernel):
    lengths = random_lengths(2)
    *inputs, gradient = random_layer(lengths, torch.bfloat16, 8, 2, 128)
    bounds = Bounds.of(lengths, GPU)
    output_and_gradients(lambda *p: attend(*p, bounds, None, kernel), inputs, gradient)
    with no_waits():
        for _ in range(3):
            assert kernel_dtype(inputs[0], inputs[2]) is torch.bfloat16
            output_and_gradients(lambda *p: attend(*p, bounds, None, kernel), inputs, gradient)
        with pytest.raises(RuntimeError, match="synchronizing"):
            bounds.offsets.tolist()


def test_what_the_kernel_takes():
    def of(dtype, size=64, value_size=64):
        query = torch.zeros(3, 2, size, device=GPU, dtype=dtype)
        return kernel_dtype(query, torch.zeros(3, 2, value_size, device=GPU, dtype=dtype))

    assert of(torch.bfloat16) is torch.bfloat16
    assert of(torch.float16, 256, 256) is torch.float16
    assert of(torch.float32) is None
    assert of(torch.float64) is None
    assert of(torch.bfloat16, 60, 60) is None
    assert of(torch.bfloat16, 264, 264) is None
    assert of(torch.bfloat16, 128, 64) is None
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert of(torch.float32) is torch.bfloat16
