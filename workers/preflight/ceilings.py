"""What one device can do at most: copies within its memory, and products in bfloat16.

Both are what a run is measured against. A GPU that stays far below its data sheet is shared,
throttled or broken.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

COPY_BYTES = 4 << 30
MATRIX_SIZE = 8192
ROUNDS = 10
LEAST_SHARE = 0.5
"""Of the data sheet: copies reach nine tenths of it and products eight on a healthy GPU."""


class DataSheet(NamedTuple):
    """Peak rates of a GPU, dense, without sparsity."""

    memory: float
    """Bytes a second."""
    bfloat16: float
    """FLOP a second."""


DATA_SHEETS = {
    "H200": DataSheet(4.8e12, 989e12),
    "H100 80GB HBM3": DataSheet(3.35e12, 989e12),
    "H100 PCIe": DataSheet(2.0e12, 756e12),
    "A100-SXM4-80GB": DataSheet(2.04e12, 312e12),
    "A100-SXM4-40GB": DataSheet(1.56e12, 312e12),
}
"""Part of a GPU's name -> its rates, by the manufacturer's data sheets."""


def data_sheet(name: str) -> DataSheet | None:
    """Rates of the GPU ``name``; none where they are not known."""
    return next((sheet for part, sheet in DATA_SHEETS.items() if part in name), None)


def copy_rate(device: torch.device, num_bytes: int = COPY_BYTES) -> float:
    """Bytes a second, read and written counted both, of a copy within the device."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * num_bytes / _median_seconds(device, lambda: target.copy_(source))


def product_rate(device: torch.device, size: int = MATRIX_SIZE) -> float:
    """FLOP a second of a product of two random square matrices in bfloat16.

    Random, because products of zeros draw less power and run faster.
    """
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / _median_seconds(device, lambda: left @ right)


def measure_device(place: int) -> dict[str, Any]:
    """Name and both rates of GPU ``place``, as CUDA counts those that this process sees."""
    device = torch.device("cuda", place)
    return {
        "name": torch.cuda.get_device_name(device),
        "copy": copy_rate(device),
        "product": product_rate(device),
    }


def _median_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Of ``ROUNDS``, each waited for, after two to warm up."""
    seconds = []
    for _ in range(ROUNDS + 2):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])
