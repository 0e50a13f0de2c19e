"""Replay diagnostics: did every routed layer go by the routes that engines returned?

For every micro-batch three tables are compared, token by token and layer by layer: the routes in
the samples, read once more; what the hook put in the place of the router's choice; and what the
experts were then called with. It checks the ids, not whether the trainer would have chosen them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.errors import ContractViolation
from workers.trainers.packing import MicroBatch
from workers.trainers.replay import RouteShape, route_rows
from workers.trainers.routers import Router

REPLAY_ROUTES = "replay_routes"


class Phase(StrEnum):
    """Why a micro-batch goes through the model."""

    SCORING = "scoring"
    TRAINING = "training"


@dataclass(slots=True)
class _Layer:
    entered: int = 0
    """Times that the router was overridden."""
    returned: int = 0
    """Times that the experts were called."""
    grad_enabled: int = 0
    """Of ``entered``, those with gradients."""
    mismatches: int = 0


class ReplayCheck:
    """Watches the replay of one model, from one ``reset`` to the next in one phase."""

    def __init__(self, routers: Sequence[Router], *, recomputes: bool = False) -> None:
        """``recomputes``: whether the backward pass computes every layer again."""
        self._names = [router.name for router in routers]
        first = routers[0]
        self._shape = RouteShape(len(routers), first.top_k, first.num_experts)
        self._recomputes = recomputes
        self._supplied: Tensor | None = None  # [T, layers, k] int32
        self.reset()
        for layer, router in enumerate(routers):
            router.experts.register_forward_pre_hook(partial(self._on_experts, layer))

    def reset(self) -> None:
        """Forget what was seen."""
        self._layers = [_Layer() for _ in self._names]
        self._forwards = self._tokens = self._documents = 0

    @contextmanager
    def over(self, batch: MicroBatch) -> Iterator[None]:
        """Compare during one micro-batch."""
        self._supplied = torch.from_numpy(route_rows(batch.route_tables, self._shape))
        self._forwards += 1
        self._tokens += len(self._supplied)
        self._documents += len(batch.route_tables)
        try:
            yield
        finally:
            self._supplied = None

    def on_override(self, layer: int, chosen: Tensor) -> None:
        """What replay put in the place of a router's choice: ``chosen`` [T, k]."""
        self._layers[layer].entered += 1
        self._layers[layer].grad_enabled += torch.is_grad_enabled()
        self._compare(layer, chosen)

    def event(self, phase: Phase, rollout_id: int) -> dict[str, Any]:
        """What was seen since the last reset, as the values of an event."""
        layers = zip(self._names, self._layers, strict=True)
        return {
            "rollout_id": rollout_id,
            "phase": phase.value,
            "tokens": self._tokens,
            "captured_tokens": self._tokens - self._documents,
            "synthetic_tail_tokens": self._documents,
            "samples": self._documents,
            "mismatches": sum(layer.mismatches for layer in self._layers),
            "layers": {
                name: {
                    "entered": layer.entered,
                    "returned": layer.returned,
                    "grad_enabled": layer.grad_enabled,
                }
                for name, layer in layers
            },
        }

    def refuse_mismatch(self, phase: Phase) -> None:
        """Raise when a layer did not go by the routes.

        Raises:
            ContractViolation: names the first such layer and what it did.
        """
        for name, layer in zip(self._names, self._layers, strict=True):
            problem = self._problem(layer, phase)
            if problem is not None:
                raise ContractViolation(
                    f"replay of routed_experts in {phase}, layer {name}: {problem}"
                )

    def _problem(self, layer: _Layer, phase: Phase) -> str | None:
        if layer.mismatches:
            return f"{layer.mismatches} tokens were sent to other experts than the engine's"
        if layer.entered < self._forwards:
            return f"entered {layer.entered} times in {self._forwards} micro-batches"
        if phase is Phase.TRAINING and self._recomputes and layer.entered < 2 * self._forwards:
            return (
                f"entered {layer.entered} times in {self._forwards} micro-batches that compute "
                "every layer twice"
            )
        if layer.returned != layer.entered:
            return f"entered {layer.entered} times, and its experts were called {layer.returned}"
        if phase is Phase.TRAINING and layer.grad_enabled < self._forwards:
            return (
                f"entered with gradients {layer.grad_enabled} times in {self._forwards} "
                "micro-batches"
            )
        return None

    def _on_experts(self, layer: int, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._supplied is not None:
            self._layers[layer].returned += 1
            self._compare(layer, inputs[1])

    def _compare(self, layer: int, chosen: Tensor) -> None:
        assert self._supplied is not None
        seen, supplied = chosen.detach().cpu(), self._supplied[:, layer]
        if seen.shape != supplied.shape:
            self._layers[layer].mismatches += max(len(seen), len(supplied))
            return
        self._layers[layer].mismatches += int((seen != supplied).any(-1).sum())
