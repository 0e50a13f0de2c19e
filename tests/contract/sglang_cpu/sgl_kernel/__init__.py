"""Stands in for SGLang's compiled kernels where there is no GPU driver to load them.

The published kernel wheels link the CUDA driver, so they cannot even be imported on a CPU machine.
SGLang imports them by name, also for what a CPU server never calls. Here every name imports; what
it names raises when it is called. No operator is registered with torch: SGLang then finds no
special instructions of the CPU and computes with plain PyTorch.

Buffers that are asked for in pinned memory are made of ordinary memory: pinning is the work of the
driver, and SGLang asks for it without a look at the device.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__version__ = "0.0.0+cpu"
FACTORIES = ("empty", "full", "ones", "tensor", "zeros")
"""Functions of torch that take ``pin_memory``."""


class AbsentKernel:
    """A kernel that can be imported, passed on and looked into, but not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> "AbsentKernel":
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentKernel(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError(f"{self.__name__} needs a GPU; this is the CPU stand-in")


def __getattr__(name: str) -> AbsentKernel:
    if name.startswith("__"):
        raise AttributeError(name)
    return AbsentKernel(f"{__name__}.{name}")


def _pageable(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``factory`` without pinned memory."""

    @wraps(factory)
    def make(*args: Any, **told: Any) -> torch.Tensor:
        return factory(*args, **(told | {"pin_memory": False}))

    return make


if not torch.cuda.is_available():
    for _name in FACTORIES:
        setattr(torch, _name, _pageable(getattr(torch, _name)))
