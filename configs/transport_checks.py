"""Checks of ``core.publication_transport``: which engines can take weights in which way."""

from collections.abc import Iterator

from configs.problem import Problem
from configs.run import RunSpec

KEY = "core.publication_transport"
_REMEDY = 'use "auto"'


def transport_problems(spec: RunSpec) -> Iterator[Problem]:
    """Every reason why the engines could not take weights as asked for."""
    given = spec.core.publication_transport
    if given in ("auto", "disk"):
        return
    if spec.core.publication_mode == "rolling":
        yield Problem(
            KEY,
            'needs weights that wait for each engine in turn (core.publication_mode = "rolling"), '
            "which only a folder does",
            given,
            'use "disk" or "auto"',
        )
    if given == "nccl" and spec.inference.engine == "native":
        yield Problem(KEY, "the native engine takes no broadcast", given, _REMEDY)
    elif given == "nccl" and spec.colocated:
        yield Problem(
            KEY,
            "NCCL does not connect two processes on one GPU, as colocated ones are",
            given,
            'use "ipc" or "auto"',
        )
    elif given == "ipc" and spec.placement.mode == "disaggregated":
        yield Problem(
            KEY,
            "engines on GPUs of their own cannot open the memory of the trainer's",
            given,
            'use "nccl" or "auto"',
        )
