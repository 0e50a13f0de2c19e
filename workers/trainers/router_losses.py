"""Auxiliary losses of routers: load balancing (arXiv 2101.03961) and router z-loss (2202.08906).

Of one routed layer, over the tokens t of the step's training forwards, with logits x_t over E
experts, p_t = softmax(x_t), and k experts a token:

    load_balancing = E * sum over t of w_t * sum over e of f_g(t),e * p_t,e
    router_z       =     sum over t of w_t * logsumexp(x_t)^2

f_g,e is the share of the k * |g| assignments of group g that expert e got; a constant for the
gradient. A group is all tokens of one forward (``pack``) or of one document (``sequence``). w_t is
1 / tokens (``token``), or 1 / (documents * tokens of t's document) (``response``), where tokens and
documents are those of the whole optimizer step on all ranks: so micro-batches and ranks add up to
the means over the step, and nobody averages later. A perfectly even layer has load balancing 1.

The step's objective is the sum over layers of both, each with its weight. Prompts, last tokens and,
under replay, the tail rows count like every other token; fillers do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from configs.run import RunSpec
from models.errors import ContractViolation, NonFiniteLoss
from workers.trainers.packing import on_device

Reduction = Literal["token", "response"]


class Routed(NamedTuple):
    """What a router answered in one forward."""

    logits: Tensor
    """[T, E], with their graph."""
    chosen: Tensor
    """[T, k] int64: the experts that tokens were sent to."""


@dataclass(frozen=True, slots=True)
class RouterObjective:
    """The numbers of the auxiliary losses; see ``training.router_*``."""

    load_balancing_weight: float = 0.0
    router_z_weight: float = 0.0
    grouping: Literal["pack", "sequence"] = "pack"
    reduction: Reduction = "token"
    z_reduction: Reduction = "token"
    count_source: Literal["executed", "router_selected"] = "executed"

    @classmethod
    def of(cls, spec: RunSpec) -> "RouterObjective":
        """The settings that a run file asks for."""
        training = spec.training
        return cls(
            load_balancing_weight=training.router_aux_loss_weight,
            router_z_weight=training.router_z_loss_weight,
            grouping=training.router_aux_loss_grouping,
            reduction=training.router_aux_loss_reduction,
            z_reduction=training.router_z_loss_reduction,
            count_source=training.router_aux_count_source,
        )

    @property
    def is_on(self) -> bool:
        """Whether any auxiliary loss has a gradient."""
        return self.load_balancing_weight > 0 or self.router_z_weight > 0


class AuxiliaryParts(NamedTuple):
    """Both losses over layers, each with its weight."""

    load_balancing: float
    router_z: float


class RouterLosses:
    """One rank's part of the auxiliary losses of one optimizer step."""

    def __init__(self, objective: RouterObjective, tokens: int, documents: int) -> None:
        """``tokens``, ``documents``: that go through the model in the step, on all ranks."""
        self.objective = objective
        self.tokens = tokens
        self.documents = documents
        self._parts: list[Tensor] = []  # [2] each

    def of_pack(self, layers: Sequence[Routed], lengths: Sequence[int]) -> Tensor:
        """The weighted losses of one forward, to be differentiated; counted once.

        Args:
            layers: what every router answered.
            lengths: tokens of the documents, one after the other.

        Raises:
            ContractViolation: the documents are not what went through the routers.
        """
        fed = {len(layer.logits) for layer in layers}
        if fed != {sum(lengths)}:
            raise ContractViolation(
                f"router losses: routers saw {sorted(fed)} tokens, the documents of the pack have "
                f"{sum(lengths)}"
            )
        settings, pack = self.objective, self._pack(lengths, layers[0].logits.device)
        balance = z = torch.zeros((), device=pack.groups.device)
        for logits, chosen in layers:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            if settings.count_source == "router_selected":
                chosen = wide.detach().topk(chosen.shape[-1], -1).indices
            balance = balance + load_balancing(wide, chosen, pack)
            z = z + router_z(wide, pack)
        balance, z = balance * settings.load_balancing_weight, z * settings.router_z_weight
        self._parts.append(torch.stack([balance, z]).detach().double())
        return balance + z

    def finish(self) -> AuxiliaryParts:
        """This rank's sums over its forwards.

        Raises:
            NonFiniteLoss: one of them is no finite number.
        """
        if not self._parts:
            return AuxiliaryParts(0.0, 0.0)
        parts = AuxiliaryParts(*torch.stack(self._parts).sum(0).tolist())
        if not bool(torch.tensor(parts).isfinite().all()):
            raise NonFiniteLoss(
                f"the auxiliary losses of the routers are {parts.load_balancing} (load balancing) "
                f"and {parts.router_z} (z); the optimizer step was not taken"
            )
        return parts

    def as_event(self) -> dict[str, Any]:
        """What the ``optimizer`` event says of them."""
        settings = self.objective
        return {
            "auxiliary_denominator": self.tokens,
            "auxiliary_response_denominator": self.documents,
            "router_objective": {
                "load_balancing_weight": settings.load_balancing_weight,
                "router_z_weight": settings.router_z_weight,
                "grouping": settings.grouping,
                "reduction": settings.reduction,
                "z_reduction": settings.z_reduction,
                "count_source": settings.count_source,
            },
            "local_auxiliary_objective": self.finish()._asdict(),
        }

    def _pack(self, lengths: Sequence[int], device: torch.device) -> "Pack":
        """On ``device``, without waiting for it."""
        counts = torch.tensor(lengths)
        groups, sizes = torch.arange(len(lengths)).repeat_interleave(counts), counts
        if self.objective.grouping == "pack":
            groups, sizes = torch.zeros_like(groups), counts.sum(0, keepdim=True)
        parts = (
            groups,
            sizes,
            self._weights(counts, self.objective.reduction),
            self._weights(counts, self.objective.z_reduction),
        )
        return Pack(*(on_device(part, device) for part in parts))

    def _weights(self, lengths: Tensor, reduction: Reduction) -> Tensor:
        """[T] float64 of the documents' tokens."""
        own = torch.full(lengths.shape, 1 / self.tokens, dtype=torch.float64)
        if reduction == "response":
            own = 1 / (self.documents * lengths.double())
        return own.repeat_interleave(lengths)


class Pack(NamedTuple):
    """The tokens of one forward, in G groups."""

    groups: Tensor
    """[T] int64: which tokens share a histogram; 0.. G - 1."""
    sizes: Tensor
    """[G] tokens of each group."""
    weights: Tensor
    """[T] float64: w of the load balancing."""
    z_weights: Tensor
    """[T] float64: w of the z-loss."""


def load_balancing(logits: Tensor, chosen: Tensor, pack: Pack) -> Tensor:
    """The load-balancing loss of one layer; only ``logits`` [T, E] have a gradient.

    ``chosen``: [T, k] int64 experts.
    """
    experts, top_k = logits.shape[-1], chosen.shape[-1]
    assigned = (pack.groups[:, None] * experts + chosen).flatten()
    counts = logits.new_zeros(len(pack.sizes) * experts)
    counts.scatter_add_(0, assigned, torch.ones_like(assigned, dtype=logits.dtype))
    shares = counts.view(-1, experts) / (top_k * pack.sizes[:, None])
    even = (shares[pack.groups] * torch.softmax(logits, -1)).sum(-1)
    return experts * (even * pack.weights.to(logits.dtype)).sum()


def router_z(logits: Tensor, pack: Pack) -> Tensor:
    """The z-loss of one layer with ``logits`` [T, E]."""
    return (logits.logsumexp(-1).square() * pack.z_weights.to(logits.dtype)).sum()
