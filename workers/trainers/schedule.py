"""Learning-rate schedules, one value an optimizer step.

With s completed steps, W warm-up steps and N steps in all, the next step uses

    s < W                 max * (s + 1) / W
    constant              max
    linear                min + (max - min) * (1 - p)                  p = (s - W) / (N - W)
    cosine                min + (max - min) * (1 + cos(pi * p)) / 2
    inverse-square-root   max(min, max * sqrt(max(W, 1) / max(s, 1)))

linear and cosine stay at the floor from s = N on.
"""

import math
from dataclasses import dataclass

from configs.run import RunSpec
from models.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A schedule. Stateless: the value follows from the number of completed optimizer steps."""

    shape: str
    peak: float
    floor: float
    warmup_steps: int
    total_steps: int

    def __post_init__(self) -> None:
        if self.floor > self.peak:
            raise ConfigurationError(
                f"optimizer.min_lr {self.floor} exceeds optimizer.learning_rate {self.peak}"
            )
        if self.shape in ("linear", "cosine") and self.warmup_steps >= self.total_steps:
            raise ConfigurationError(
                f"optimizer.lr_warmup_steps {self.warmup_steps} must end before the "
                f"{self.total_steps} optimizer steps of the run do (lr_schedule {self.shape!r})"
            )

    @classmethod
    def of(cls, spec: RunSpec) -> "LearningRate":
        """The schedule that a run file asks for; the run's length is its decay."""
        return cls(
            shape=spec.optimizer.lr_schedule,
            peak=spec.optimizer.learning_rate,
            floor=spec.optimizer.min_lr,
            warmup_steps=spec.optimizer.lr_warmup_steps,
            total_steps=spec.training.num_rollouts * spec.steps_per_update,
        )

    def at(self, completed_steps: int) -> float:
        """Learning rate of the step that follows ``completed_steps`` finished ones."""
        if completed_steps < self.warmup_steps:
            return self.peak * (completed_steps + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        if self.shape == "inverse-square-root":
            decayed = self.peak * math.sqrt(max(self.warmup_steps, 1) / max(completed_steps, 1))
            return max(self.floor, min(self.peak, decayed))
        span = self.total_steps - self.warmup_steps
        progress = min(1.0, (completed_steps - self.warmup_steps) / span)
        share = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.floor + (self.peak - self.floor) * share
