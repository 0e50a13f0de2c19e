"""A block in which nothing may wait for the GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """What waits raises ``RuntimeError`` within the block, as far as torch sees it."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            # Told once a process, by whichever test comes first.
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
