"""What attention within documents costs on a GPU: the kernel for documents beside other ways.

    python benchmarks/document_attention.py [--flex] [--repeats 10]

One layer's attention, forward and backward, over packs of 16k and 65k tokens in documents of about
512 and 2048 tokens: 32 query heads, 8 key heads of 128, bfloat16, laid out as transformers does.
Ways: ``varlen`` (torch's kernel), ``flash4`` (where its package is), ``padded`` (rows of documents
of similar length), ``mask`` (the whole pack under a mask; up to 16k tokens) and with ``--flex``
torch's compiled flex attention. Every way is compared with the first before it is timed. What is
laid out once for all layers is not timed.

The floor of a pack is the greater of two times: its scores' arithmetic at the rate of a product of
two 8192 x 8192 matrices, and its bytes, each read or written once, at the rate of a large copy;
both are measured in the same run. The share is floor over measured time.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from workers.trainers import flash4
from workers.trainers.document_attention import BLOCKS, DocumentBlocks, attend_padded

GPU = torch.device("cuda")
HEADS, KEY_HEADS, SIZE = 32, 8, 128
PACKS = ((16384, 512), (16384, 2048), (65536, 512), (65536, 2048))
MOST_MASKED = 16384
LAYER: Any = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, is_causal=True)

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [1, heads, T, D], key, value) -> [1, T, heads, D]"""


def main() -> None:
    """Measure every pack and print a line for each way, then one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--flex", action="store_true", help="also flex attention; compiles first")
    told = parser.parse_args()
    torch.manual_seed(0)
    rates = product_rate(), copy_rate()
    print(f"product {rates[0] / 1e12:.0f} TFLOP/s, copy {rates[1] / 1e12:.2f} TB/s")
    rows = []
    for tokens, mean in PACKS:
        lengths = random_lengths(tokens, mean)
        floor = max(operations(lengths) / rates[0], moved_bytes(tokens) / rates[1]) * 1e3
        for name, figures in measure(lengths, told.repeats, told.flex).items():
            rows.append({"tokens": tokens, "mean": mean, "way": name, "floor_ms": floor, **figures})
            shown = (
                "{ms:.3f} ms ({low:.3f} to {high:.3f}), {ratio:.2f} x varlen, {mib:.0f} MiB, share "
            ).format(**figures)
            share = floor / figures["ms"]
            print(f"{tokens} tokens in {len(lengths)}, {name}: {shown}{share:.2f}", flush=True)
    about = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**about, "gpu": torch.cuda.get_device_name(), "rates": rates, "rows": rows}))


def random_lengths(tokens: int, mean: int) -> list[int]:
    """Uniform from half the mean to one and a half, the last one cut to fill the pack."""
    rng = random.Random(mean)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(rng.randrange(mean // 2, 3 * mean // 2 + 1))
    lengths[-1] -= sum(lengths) - tokens
    return lengths


def measure(lengths: Sequence[int], repeats: int, flex: bool) -> dict[str, dict[str, float]]:
    """Milliseconds, ratio to varlen and memory of every way, by turns on the same inputs."""
    tokens = sum(lengths)
    shapes = [(1, tokens, heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    leaves = [torch.randn(s, device=GPU, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    gradient = torch.randn(shapes[0], device=GPU, dtype=torch.bfloat16)
    ways = all_ways(lengths, flex)
    times: dict[str, list[float]] = {name: [] for name in ways}
    memory = {}
    expected = [part.clone() for part in once(ways["varlen"], leaves, gradient)]
    for name, way in ways.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = once(way, leaves, gradient)
        memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        for part, other in zip(found, expected, strict=True):
            gap = float((part.float() - other.float()).norm() / other.float().norm())
            if not gap <= 0.01:
                raise SystemExit(f"{name} differs from varlen by {gap:.3g}")
        once(way, leaves, gradient)
    for _ in range(repeats):
        for name, way in ways.items():
            times[name].append(timed(lambda way=way: once(way, leaves, gradient)))  # type: ignore[misc]
    middle = {name: statistics.median(seen) for name, seen in times.items()}
    return {
        name: {
            "ms": middle[name],
            "low": min(seen),
            "high": max(seen),
            "ratio": middle[name] / middle["varlen"],
            "mib": memory[name],
        }
        for name, seen in times.items()
    }


def once(way: Way, leaves: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """Forward and backward: [output, gradients of query, key, value]."""
    output = way(*(leaf.transpose(1, 2) for leaf in leaves))
    return [output.detach(), *torch.autograd.grad(output, list(leaves), gradient)]


def all_ways(lengths: Sequence[int], flex: bool) -> dict[str, Way]:
    """The ways that fit a pack of ``lengths``, varlen first."""
    blocks = DocumentBlocks(tuple(lengths), GPU)
    attention = AttentionInterface()["documents_sdpa"]
    ways: dict[str, Way] = {
        "varlen": lambda q, k, v: attention(LAYER, q, k, v, None, **{BLOCKS: blocks})[0],
        "padded": lambda q, k, v: attend_padded(sdpa_attention_forward, LAYER, q, k, v, blocks),
    }
    if flash4.missing(GPU) is None:
        newer = AttentionInterface()["documents_fa4"]
        ways["flash4"] = lambda q, k, v: newer(LAYER, q, k, v, None, **{BLOCKS: blocks})[0]
    of_document = torch.arange(len(lengths), device=GPU).repeat_interleave(
        torch.tensor(lengths, device=GPU)
    )
    if len(of_document) <= MOST_MASKED:
        same = (of_document[:, None] == of_document[None]).tril()[None, None]
        ways["mask"] = lambda q, k, v: sdpa_attention_forward(LAYER, q, k, v, same)[0]
    if flex:
        ways["flex"] = flex_way(of_document)
    return ways


def flex_way(of_document: Tensor) -> Way:
    """Flex attention with a mask by blocks; ``of_document`` [T]: the document of each token."""

    def own_past(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (of_document[query] == of_document[key])

    tokens = len(of_document)
    mask = create_block_mask(own_past, None, None, tokens, tokens, device="cuda")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)


def operations(lengths: Sequence[int]) -> int:
    """Of the scores that causality leaves: two products forward, five backward."""
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return 7 * 2 * SIZE * HEADS * pairs


def moved_bytes(tokens: int) -> int:
    """Forward q, k, v in, output out; backward these and the output's gradient in, three out."""
    return 2 * SIZE * tokens * (6 * HEADS + 6 * KEY_HEADS)


def product_rate(size: int = 8192) -> float:
    """Operations a second of a bfloat16 product of random square matrices."""
    a, b = (torch.randn(size, size, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_of(lambda: a @ b)


def copy_rate(count: int = 1 << 31) -> float:
    """Bytes a second of a copy on the device, read and written ones counted."""
    source = torch.randint(256, (count,), device=GPU, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * count / median_of(lambda: target.copy_(source))


def median_of(work: Callable[[], object]) -> float:
    """Median seconds of ten runs after three that warm up."""
    times = [timed(work) for _ in range(13)]
    return statistics.median(times[3:]) / 1e3


def timed(work: Callable[[], object]) -> float:
    """Milliseconds on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


if __name__ == "__main__":
    main()
