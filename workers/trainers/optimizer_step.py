"""One optimizer step between its gradient and its clock: what is refused, and what is done.

A rank that cannot take the step ends the run on every rank, before any weight changes: the others
would otherwise hold another version of the weights under the same number.
"""

import torch
from torch import nn

from configs.training import OptimizerSection
from models.errors import ContractViolation, NonFiniteLoss
from workers.trainers.adamw import build_optimizer, clip_gradients, last_step_norm, take_step
from workers.trainers.ranks import agreed
from workers.trainers.schedule import LearningRate
from workers.trainers.update_scores import Judge

OPTIMIZER_REJECTED = "optimizer_rejected"


class OptimizerStep:
    """AdamW on all parameters of a model."""

    def __init__(
        self, model: nn.Module, section: OptimizerSection, schedule: LearningRate, judge: Judge
    ) -> None:
        self._named = list(model.named_parameters())  # the walk takes longer than the look
        self._parameters = [p for _, p in self._named if p.requires_grad]
        self._limit = section.clip_grad
        self._schedule = schedule
        self._judge = judge
        self.optimizer = build_optimizer(self._parameters, section)

    def clear(self) -> None:
        """Drop gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def admit(
        self, completed_steps: int, published_step: int, rollout_id: int
    ) -> tuple[float, float]:
        """Clip the gradient of the step after ``completed_steps``.

        Returns:
            The gradient norm before clipping and the learning rate.

        Raises:
            ContractViolation: a parameter has no gradient, or ranks stand at different clocks.
            NonFiniteLoss: the gradient norm or the learning rate is no finite number.
        """
        self._refuse_other_clocks(completed_steps, published_step)
        with agreed(self._judge.ranks):
            rate = self._schedule.at(completed_steps)
            self._refuse_frozen()
        norm, error = 0.0, None
        try:
            norm = clip_gradients(self._parameters, self._limit, self._judge.ranks)
        except NonFiniteLoss as raised:
            error = raised
        self.refuse_rejected(error, completed_steps, rollout_id)
        return norm, rate

    def apply(self, rate: float) -> float:
        """Step at learning rate ``rate``; returns the L2 norm of the weights' change."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        take_step(self.optimizer)
        self.clear()
        return last_step_norm(self.optimizer, self._judge.ranks)

    def refuse_rejected(
        self, error: NonFiniteLoss | None, completed_steps: int, rollout_id: int
    ) -> None:
        """Raise on every rank when one of them has an ``error``; no clock moves."""
        rejecting = torch.tensor([float(error is not None)])
        if float(self._judge.ranks.all_reduce_sum(rejecting)) == 0:
            return
        self.clear()
        event = {
            "step": completed_steps + 1,
            "rollout_id": rollout_id,
            "local_optimizer_skipped": error is not None,
        }
        self._judge.append(OPTIMIZER_REJECTED, event)
        self._judge.ranks.agree(error)

    def _refuse_other_clocks(self, completed_steps: int, published_step: int) -> None:
        """Every rank must take the same step; all of them see when one does not."""
        own = torch.tensor([completed_steps, -completed_steps, published_step, -published_step])
        most = [int(x) for x in self._judge.ranks.all_reduce_max(own).tolist()]
        if most != own.tolist():
            raise ContractViolation(
                f"rank {self._judge.ranks.rank} is at {completed_steps} completed steps with "
                f"version {published_step} published; over all ranks they are {-most[1]} to "
                f"{most[0]} and {-most[3]} to {most[2]}"
            )

    def _refuse_frozen(self) -> None:
        """A parameter without a gradient would stay as it is, in silence."""
        frozen = [name for name, p in self._named if p.grad is None]
        if frozen:
            raise ContractViolation(
                f"{len(frozen)} parameters have no gradient after the backward pass and would "
                f"never change: {', '.join(frozen[:3])}; none may be frozen"
            )
