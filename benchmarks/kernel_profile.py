"""What one update of a trainer spends its GPU's time on, by kinds of kernels.

On a CPU operators take the place of kernels, to see that it runs at all.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

LINES = 20
"""Most lines of a table: kinds first, then the kernels that take longest."""
PRODUCTS = "products"
_KINDS = {
    "attention forward": ("flash_fwd", "varlen_attn.default", "fmha_cutlassf", "scaled_dot"),
    "attention backward": ("flash_bwd", "fmha_cutlassb"),
    PRODUCTS: ("gemm", "nvjet", "cutlass", "xmma", "splitk", "aten::mm", "aten::addmm"),
    "log-softmax": ("softmax", "logsumexp", "gather", "online"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "copies": ("memcpy", "memset"),
    "generated": ("triton_",),
    "casts": ("direct_copy_kernel", "bfloat16_copy_kernel", "float_copy_kernel", "aten::copy_"),
    "reductions": ("reduce_kernel", "layer_norm", "rms_norm", "aten::sum", "aten::mean"),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kernel."""

    name: str
    milliseconds: float
    launches: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Of one update."""

    kernels: list[Kernel]
    products: dict[str, float]
    """Milliseconds of products by the part of the model, where the profiler says it."""
    wall_ms: float
    """With the profiler on."""

    @property
    def busy_ms(self) -> float:
        """Of all kernels together."""
        return sum(kernel.milliseconds for kernel in self.kernels)

    def kinds(self) -> dict[str, tuple[float, int]]:
        """Milliseconds and launches of each kind, most first."""
        sums: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for kernel in self.kernels:
            spent, launches = sums[kernel_kind(kernel.name)]
            sums[kernel_kind(kernel.name)] = (
                spent + kernel.milliseconds,
                launches + kernel.launches,
            )
        return dict(sorted(sums.items(), key=lambda item: -item[1][0]))

    def as_json(self) -> dict[str, float]:
        """Milliseconds by kind, of products by part, and of the whole."""
        by_kind = {kind: spent for kind, (spent, _) in self.kinds().items()}
        parts = {f"{PRODUCTS}: {part}": spent for part, spent in self.products.items()}
        return {**by_kind, **parts, "busy": self.busy_ms, "wall, profiler on": self.wall_ms}

    def table(self) -> str:
        """At most ``LINES`` lines."""
        busy = max(self.busy_ms, 1e-9)
        lines = [
            f"{'kind of kernel':32} {'ms':>9} {'share':>6} {'launches':>8}",
            f"{'busy, of wall ' + format(self.wall_ms, '.0f') + ' ms':32} {busy:9.1f}",
        ]
        for kind, (spent, launches) in self.kinds().items():
            lines.append(f"{kind:32} {spent:9.1f} {spent / busy:6.1%} {launches:8}")
            if kind == PRODUCTS:
                parts = sorted(self.products.items(), key=lambda item: -item[1])
                lines += [f"  {part:30} {own:9.1f} {own / busy:6.1%}" for part, own in parts]
        for kernel in sorted(self.kernels, key=lambda each: -each.milliseconds):
            kind = kernel_kind(kernel.name)
            if kind not in (PRODUCTS, "attention forward", "attention backward"):
                spent = kernel.milliseconds
                lines.append(
                    f"{short(kernel.name):32} {spent:9.1f} {spent / busy:6.1%} {kernel.launches:8}"
                )
        return "\n".join(lines[:LINES])


def profiled(update: Callable[[], object], shape: dict[str, Any], device: str) -> Profile:
    """Run ``update`` once under the profiler.

    Products are told apart by their sizes, as far as the profiler knows which operator ran them.
    """
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device == "cuda" else []
    started = time.perf_counter()
    with profile(activities=activities, record_shapes=True) as seen:
        update()
    wall = (time.perf_counter() - started) * 1e3
    kernels: dict[str, Kernel] = {}
    products: dict[str, float] = defaultdict(float)
    for event in seen.key_averages(group_by_input_shape=True):
        on_device = "CPU" not in str(event.device_type)
        spent = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if event.key in ("aten::mm", "aten::addmm"):
            products[product_kind(event.input_shapes, shape)] += spent / 1e3
        if on_device == (device == "cuda"):
            known = kernels.get(event.key, Kernel(event.key, 0.0, 0))
            kernels[event.key] = Kernel(
                event.key, known.milliseconds + spent / 1e3, known.launches + event.count
            )
    return Profile(list(kernels.values()), dict(products), wall)


def kernel_kind(name: str) -> str:
    """What a kernel or operator is for, by its name."""
    name = name.lower()
    return next(
        (kind for kind, marks in _KINDS.items() if any(mark in name for mark in marks)),
        "elementwise",
    )


def product_kind(shapes: Sequence[Sequence[int]], shape: dict[str, Any]) -> str:
    """Which part of the model a product belongs to, by the sizes of its factors."""
    sizes = {size for factor in shapes if isinstance(factor, list) for size in factor}
    if shape["vocab_size"] in sizes:
        return "head"
    return "mlp" if shape["intermediate_size"] in sizes else "attention projections"


def short(name: str) -> str:
    """The telling part of a kernel's name: torch's templates wrap it several times."""
    words = re.split(r"[^\w#.]+", name.removeprefix("void "))
    telling = [word for word in words if re.search(r"unctor|kernel_cuda|_ops?$|triton_", word)]
    plain = [word for word in words if word not in ("at", "native", "aten")]
    return (telling or plain or [name])[0 if not telling else -1][:32]
