"""``[training]`` and ``[optimizer]``: what one update is."""

from typing import Literal

from pydantic import Field

from configs.section import Section


class TrainingSection(Section):
    """``[training]``: batch shape, loss, cadence."""

    num_rollouts: int = Field(default=100, ge=1)
    """Updates of the run (rollout collections consumed)."""
    rollout_batch_size: int = Field(default=8, ge=1)
    """Prompt groups in a collection."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Sibling samples in a group."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Samples per optimizer step; divides the collection. Default: the whole collection."""
    loss_aggregation: Literal["response", "token"] = "response"
    """Mean over responses of token means, or mean over all tokens of the step."""
    grpo_std_normalization: bool = False
    """Divide centered rewards by the group's standard deviation (ddof 1, + 1e-6)."""
    eps_clip: float = Field(default=0.2, ge=0, lt=1)
    """Lower PPO clip."""
    eps_clip_high: float = Field(default=0.28, ge=0)
    """Upper PPO clip."""
    eps_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip for negative advantages; none: off."""
    use_tis: bool | None = None
    """Truncated importance weights trainer/behavior; default: on when lag or dtypes differ."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Largest importance weight."""
    tis_clip_low: float = Field(default=0.0, ge=0)
    """Smallest importance weight."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Entropy bonus."""
    save_checkpoints: bool = True
    """Commit checkpoints; without them a lost trainer starts over."""
    save_interval: int | None = Field(default=None, ge=1)
    """Updates between checkpoints; default: only the last."""


class OptimizerSection(Section):
    """``[optimizer]``: AdamW in float32."""

    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Floor after decay; at most the learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape after the warm-up."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Linear warm-up, in optimizer steps."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """First-moment decay."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Second-moment decay."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Denominator offset."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Global gradient-norm clip; 0: off."""
