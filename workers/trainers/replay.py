"""Expert routes of samples: what an engine must have returned, and their rows for the trainer.

An engine returns int32 [tokens - 1, layers, top_k] in C order, little-endian: the experts of every
token that it fed to the model, layers without a router left out. The last token of a document was
sampled and never fed. The trainer feeds it, so each document gets one row more, its tail: experts
0..top_k-1 in every layer. Nothing is predicted from it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from models.errors import ContractViolation
from workers.trainers.batch import TrainingBatch

_TYPE = np.dtype("<i4")

Routes = npt.NDArray[np.int32]
"""[tokens, layers, top_k]"""


class RouteShape(NamedTuple):
    """What a model's routes look like."""

    layers: int
    """Layers with a router."""
    top_k: int
    experts: int
    """Experts of a layer."""


def refuse_bad_routes(batch: TrainingBatch, members: Sequence[int], shape: RouteShape) -> None:
    """Check the routes of samples ``members``.

    Raises:
        ContractViolation: names group, sample and field.
    """
    for member in members:
        sample = batch.samples[member]
        fed = len(sample.prompt_ids) + len(sample.response_ids) - 1
        problem = route_problem(sample.routes, fed, shape)
        if problem is not None:
            raise ContractViolation(f"{sample.where}: routed_experts {problem}")


def route_problem(table: bytes | None, fed: int, shape: RouteShape) -> str | None:
    """What is wrong with the routes of a document of ``fed`` + 1 tokens; None when they are good.

    The message goes on after the name of the field.
    """
    layers, top_k, experts = shape
    if table is None:
        return (
            "is missing: training.use_rollout_routing_replay needs the routes of every sample; "
            "sample with engines that were started with --enable-return-routed-experts"
        )
    expected = fed * layers * top_k * _TYPE.itemsize
    if len(table) != expected:
        return (
            f"has {len(table)} bytes; int32 [{fed} tokens, {layers} layers, top {top_k}] has "
            f"{expected}"
        )
    routes = np.frombuffer(table, _TYPE).reshape(fed, layers, top_k)
    if routes.min() < 0 or routes.max() >= experts:
        return _at(routes, (routes < 0) | (routes >= experts), f"is outside 0..{experts - 1}")
    ranked = np.sort(routes, axis=-1)
    twice = ranked[..., 1:] == ranked[..., :-1]
    if twice.any():
        token, layer, place = (int(i) for i in np.argwhere(twice)[0])
        return f"[{token}, {layer}] chooses expert {ranked[token, layer, place]} twice"
    return None


def route_rows(tables: Sequence[bytes], shape: RouteShape) -> Routes:
    """Routes [tokens, layers, top_k] of the documents of a pack, each with its tail."""
    layers, top_k, _ = shape
    tail = np.broadcast_to(np.arange(top_k, dtype=_TYPE), (1, layers, top_k))
    parts = []
    for table in tables:
        parts += [np.frombuffer(table, _TYPE).reshape(-1, layers, top_k), tail]
    return np.concatenate(parts)


def _at(routes: Routes, wrong: npt.NDArray[np.bool_], what: str) -> str:
    """Names the first wrong value."""
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"[{', '.join(map(str, place))}] is expert {routes[place]}, which {what}"
