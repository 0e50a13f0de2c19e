"""An all-reduce over every GPU of this machine, one process a GPU, as a trainer's ranks do it."""

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

TIMEOUT_S = 120.0
"""For the ranks to meet, and for each collective."""
NUM_ELEMENTS = 64 << 20
"""Of float32: 256 MiB, large enough that latency does not count."""
ROUNDS = 10
_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""As trainer and engines set it."""


def all_reduce(
    num_ranks: int, backend: str = "nccl", num_elements: int = NUM_ELEMENTS
) -> dict[str, Any]:
    """Sum one tensor over ``num_ranks`` processes.

    Returns:
        ``ranks``, ``right`` (whether every rank has the right sum), ``bus_rate`` in bytes a second:
        what each rank must send and receive of the tensor, 2 (n - 1) / n of it, over the time.

    Raises:
        ProcessRaisedException, ProcessExitedException: of torch, when a rank fails.
    """
    os.environ.update(_ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, backend, num_elements, folder)
        spawn(_rank, arguments, nprocs=num_ranks)
        told = [Path(folder, str(rank)).read_text().split() for rank in range(num_ranks)]
    seconds = max(float(time_of_rank) for _, time_of_rank in told)
    sent = 4 * num_elements * 2 * (num_ranks - 1) / num_ranks
    return {
        "ranks": num_ranks,
        "right": all(right == "True" for right, _ in told),
        "bus_rate": sent / seconds,
    }


def _rank(rank: int, num_ranks: int, backend: str, num_elements: int, folder: str) -> None:
    """One process: takes part, and writes whether the sum was right and the seconds of a round."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    ones = torch.full((num_elements,), rank + 1.0, device=device)
    distributed.all_reduce(ones)
    right = bool((ones == num_ranks * (num_ranks + 1) / 2).all())
    seconds = _seconds_of_round(torch.zeros_like(ones))
    distributed.destroy_process_group()
    Path(folder, str(rank)).write_text(f"{right} {seconds}")


def _seconds_of_round(tensor: torch.Tensor) -> float:
    for _ in range(2):
        distributed.all_reduce(tensor)
    _wait(tensor)
    started = time.perf_counter()
    for _ in range(ROUNDS):
        distributed.all_reduce(tensor)
    _wait(tensor)
    return (time.perf_counter() - started) / ROUNDS


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
