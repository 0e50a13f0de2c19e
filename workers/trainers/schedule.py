"""Learning-rate schedules, one value an optimizer step.

With s completed steps, W warm-up steps and D decay steps, the next step uses

    W > 0 and s <= W      init + (max - init) * s / W
    constant              max
    s > D                 min
    inverse-square-root   max(min, max * sqrt(max(W, 1) / max(s, 1)))
    else                  min + (max - min) * c(x)      x = (s - W) / (D - W)

    linear                c(x) = 1 - x
    cosine                c(x) = (1 + cos(pi * x)) / 2
    WSD                   1 until D - E; then c(y), y = (s - (D - E)) / E over the last E steps:
                          linear and cosine as above, exponential 2 * 0.5^y - 1, minus_sqrt
                          1 - sqrt(y)
"""

import math
from dataclasses import dataclass

from configs.run import RunSpec
from models.errors import ConfigurationError, NonFiniteLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """A schedule. Stateless: the value follows from the number of completed optimizer steps."""

    shape: str = "constant"
    peak: float
    floor: float = 0.0
    warmup_init: float = 0.0
    warmup_steps: int = 0
    decay_steps: int
    wsd_decay_steps: int = 0
    wsd_shape: str = "exponential"

    def __post_init__(self) -> None:
        for name, value in (("min_lr", self.floor), ("lr_warmup_init", self.warmup_init)):
            if value > self.peak:
                raise ConfigurationError(
                    f"optimizer.{name} {value} exceeds optimizer.learning_rate {self.peak}"
                )
        if self.shape != "constant" and self.warmup_steps >= self.decay_steps:
            raise ConfigurationError(
                f"optimizer.lr_warmup_steps {self.warmup_steps} must end before the "
                f"{self.decay_steps} optimizer steps of the decay do (lr_schedule {self.shape!r})"
            )
        room = self.decay_steps - self.warmup_steps
        if self.shape == "WSD" and not 1 <= self.wsd_decay_steps <= room:
            raise ConfigurationError(
                f"optimizer.lr_wsd_decay_steps {self.wsd_decay_steps} must be in 1..{room}, the "
                "optimizer steps between the warm-up and the end of the decay"
            )

    @classmethod
    def of(cls, spec: RunSpec) -> "LearningRate":
        """The schedule that a run file asks for."""
        optimizer = spec.optimizer
        return cls(
            shape=optimizer.lr_schedule,
            peak=optimizer.learning_rate,
            floor=optimizer.min_lr,
            warmup_init=optimizer.lr_warmup_init,
            warmup_steps=optimizer.lr_warmup_steps,
            decay_steps=spec.lr_decay_steps,
            wsd_decay_steps=optimizer.lr_wsd_decay_steps or 0,
            wsd_shape=optimizer.lr_wsd_decay_style,
        )

    def at(self, completed_steps: int) -> float:
        """Learning rate of the step that follows ``completed_steps`` finished ones.

        Raises:
            NonFiniteLoss: the value is no finite number of at least 0.
        """
        rate = self._at(completed_steps)
        if not (math.isfinite(rate) and rate >= 0):
            raise NonFiniteLoss(f"the learning rate after {completed_steps} steps is {rate}")
        return rate

    def _at(self, s: int) -> float:
        warmup = self.warmup_steps
        if warmup > 0 and s <= warmup:
            return self.warmup_init + (self.peak - self.warmup_init) * s / warmup
        if self.shape == "constant":
            return self.peak
        if s > self.decay_steps:
            return self.floor
        if self.shape == "inverse-square-root":
            return max(self.floor, self.peak * math.sqrt(max(warmup, 1) / max(s, 1)))
        return self.floor + (self.peak - self.floor) * self._share(s)

    def _share(self, s: int) -> float:
        """Part of the way from floor to peak that is left."""
        if self.shape != "WSD":
            return _decay(
                self.shape, (s - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
            )
        begin = self.decay_steps - self.wsd_decay_steps
        if s <= begin:
            return 1.0
        return _decay(self.wsd_shape, (s - begin) / self.wsd_decay_steps)


def _decay(shape: str, progress: float) -> float:
    """From 1 at progress 0 to 0 at progress 1."""
    if shape == "linear":
        return 1 - progress
    if shape == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    if shape == "exponential":
        return 2 * 0.5**progress - 1
    return 1 - math.sqrt(progress)  # minus_sqrt
