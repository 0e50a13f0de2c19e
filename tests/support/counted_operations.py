"""Counts what torch is asked for: on a GPU each of these is at least one launch."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountedOperations(TorchDispatchMode):
    """A context in which operations are counted, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch: one operation."""
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))
