"""Counting what routers choose, and replaying what engines chose.

A hook on each router sees its answer before the experts do. It counts the choices of a training
forward, once: neither scoring nor a forward that is computed again during the backward pass counts.
In replay it puts the engine's experts in the place of the router's own and takes their weights from
the router's probabilities under the router's own rule, so the gradient still reaches the router.
With auxiliary losses it keeps the logits of that forward until the backward pass begins.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from configs.run import RunSpec
from models.errors import ConfigurationError, ContractViolation
from workers.trainers.packing import MicroBatch, on_device
from workers.trainers.replay import RouteShape, route_rows
from workers.trainers.replay_check import Phase, ReplayCheck
from workers.trainers.router_losses import Routed, RouterLosses, RouterObjective
from workers.trainers.routers import Router, find_routers


class Routing:
    """Hooks on the routers of one model. Inert but for the time of ``micro_batch``."""

    def __init__(
        self,
        routers: Sequence[Router] = (),
        *,
        replay: bool = False,
        check: bool = False,
        recomputes: bool = False,
        objective: RouterObjective | None = None,
    ) -> None:
        """Hook the routers.

        Args:
            routers: of the model, first layer first.
            replay: send tokens to the experts that engines chose.
            check: compare what is replayed with what was supplied.
            recomputes: whether the backward pass computes every layer again; for the check.
            objective: auxiliary losses.
        """
        self.names = tuple(router.name for router in routers)
        self.replay = replay
        self.check = ReplayCheck(routers, recomputes=recomputes) if replay and check else None
        self._phase: Phase | None = None
        self._counting = False
        self._chosen: Tensor | None = None  # [layers, T, k] int64
        self._none = torch.zeros(0, 0, dtype=torch.long)
        self._packs: list[Tensor] = []  # [layers, experts] each
        self._routed: list[Routed] = []  # layers of the current micro-batch, with auxiliary losses
        self._objective = objective or RouterObjective()
        self.losses = RouterLosses(self._objective, 1, 1)
        """Of the current optimizer step."""
        if routers:
            first = routers[0]
            self.shape = RouteShape(len(routers), first.top_k, first.num_experts)
            device = next(first.module.parameters()).device
            self._none = torch.zeros(len(routers), first.num_experts, dtype=torch.long).to(device)
        for layer, router in enumerate(routers):
            router.module.register_forward_hook(partial(self._on_router, layer, router))

    @classmethod
    def of(cls, spec: RunSpec, model: nn.Module) -> "Routing":
        """For the model that the run ``spec`` trains.

        Raises:
            ConfigurationError: replay or an auxiliary loss is asked for, and the model has no
                routers.
        """
        routers = find_routers(model)
        replay, objective = spec.training.use_rollout_routing_replay, RouterObjective.of(spec)
        if replay and not routers:
            raise ConfigurationError(
                f"training.use_rollout_routing_replay: {type(model).__name__} has no routers whose "
                "choices could be replayed; remove the key, or train a mixture of experts"
            )
        if objective.is_on and not routers:
            raise ConfigurationError(
                "training.router_aux_loss_weight, training.router_z_loss_weight: "
                f"{type(model).__name__} has no routers; remove the keys, or train a mixture of "
                "experts"
            )
        return cls(
            routers,
            replay=replay,
            check=spec.core.replay_diagnostics,
            recomputes=spec.trainer.activation_checkpointing,
            objective=objective,
        )

    def begin_step(self, tokens: int, documents: int) -> None:
        """Count from zero; ``tokens``, ``documents``: of the optimizer step on all ranks."""
        self._packs = []
        self.losses = RouterLosses(self._objective, tokens, documents)

    def counts(self) -> Tensor:
        """[packs, layers, experts] int64 tokens that each expert was given; a copy.

        Packs are the training micro-batches since ``begin_step``, fillers left out.
        """
        return torch.stack(self._packs).cpu() if self._packs else self._none.cpu()[None][:0]

    @contextmanager
    def micro_batch(self, batch: MicroBatch, phase: Phase) -> Iterator[None]:
        """Everything that is computed for ``batch``, its backward pass included.

        Fillers go by the routers' own choices and are not counted.
        """
        if batch.is_filler:
            yield
            return
        self._phase, self._counting = phase, phase is Phase.TRAINING
        if self._counting:
            self._packs.append(torch.zeros_like(self._none))
        self._chosen = self._routes(batch) if self.replay else None
        try:
            with self.check.over(batch) if self.check else nullcontext():
                yield
        finally:
            self._phase, self._counting, self._chosen, self._routed = None, False, None, []

    def forward_ended(self) -> None:
        """What follows in the micro-batch is backward, and a forward within it is a repetition."""
        self._counting = False

    def auxiliary_loss(self, batch: MicroBatch) -> Tensor | None:
        """What the micro-batch adds to the loss for its routers, with their graph; called once.

        Raises:
            ContractViolation: the micro-batch is not laid out in documents.
        """
        return self.losses.of_pack(self._routed, batch.document_lengths) if self._routed else None

    def _routes(self, batch: MicroBatch) -> Tensor:
        """[layers, T, k] on the routers' device, for this micro-batch only."""
        rows = torch.from_numpy(route_rows(batch.route_tables, self.shape))
        if rows.shape[0] != batch.input_ids.numel():
            raise ContractViolation(
                f"a micro-batch of {batch.input_ids.numel()} tokens has expert routes for "
                f"{rows.shape[0]}"
            )
        return on_device(rows, self._none.device).long().transpose(0, 1).contiguous()

    def _on_router(
        self, layer: int, router: Router, _module: nn.Module, _inputs: Any, output: Any
    ) -> Any:
        if self._phase is None:
            return None
        logits, weights, chosen = output
        if self._chosen is not None:
            chosen = self._chosen[layer]
            weights = router.weights(logits, chosen)
            if self.check is not None:
                self.check.on_override(layer, chosen)
        if self._counting:
            flat = chosen.detach().reshape(-1)
            self._packs[-1][layer].scatter_add_(0, flat, torch.ones_like(flat))
            if self._objective.is_on:
                self._routed.append(Routed(logits, chosen))
        return logits, weights, chosen
