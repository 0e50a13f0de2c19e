"""Lets torchvision be imported beside a torch that was built without CUDA.

The package index has torchvision for CUDA only. Its compiled part does not load beside a CPU build
of torch, and its import then fails at two operators that it describes without a look whether they
exist. SGLang imports it for pictures; a text model never calls it.

``scripts/setup-sglang-cpu`` writes a ``.pth`` file that imports this module at every start of the
interpreter. That costs no import of torch: the two operators are declared when torchvision is first
looked for.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclareOperators:
    """A finder that finds nothing: it acts once, when torchvision is about to be imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None, always: the next finder imports torchvision."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare()
        return None


def _declare() -> None:
    import torch

    if torch.version.cuda is not None or _is_cpu_build():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        library.define(name + SCHEMA)
    _kept.append(library)


def _is_cpu_build() -> bool:
    """Whether torchvision brings its operators by itself."""
    try:
        return version("torchvision").endswith("+cpu")
    except PackageNotFoundError:
        return True


_kept: list[object] = []
"""An operator's declaration ends with the library object."""
sys.meta_path.insert(0, DeclareOperators())
