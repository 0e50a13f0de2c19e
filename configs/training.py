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
    advantage_estimator: Literal["grpo", "gspo"] = "grpo"
    """Ratio of the loss: of each token (grpo), or exp of a response's mean log-ratio (gspo)."""
    normalize_advantages: bool = False
    """Whiten advantages over all response tokens of the collection: mean 0, variance 1."""
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
    use_rollout_routing_replay: bool = False
    """Mixture of experts: send every token to the experts that the engine chose for it, in scoring
    and in training; their weights are still the trainer's own."""
    use_rollout_logprobs: bool = False
    """Take ratios against the behavior log-probs instead of the trainer's before the update;
    excludes importance weights."""
    dppo_divergence_type: Literal["tv", "kl"] | None = None
    """Mask tokens instead of clipping ratios: a token drops out when its probability left the old
    one too far (total variation, or Bernoulli KL) in the direction of its advantage; none: clip."""
    dppo_threshold: float = Field(default=0.1, gt=0)
    """Largest divergence of a token that still counts, with ``dppo_divergence_type``."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Entropy bonus."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the prepared model; above 0 a frozen copy of it is kept."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """Estimator of the KL term, with d = trainer - reference log-prob: d, d^2 / 2, or
    exp(-d) - 1 + d; ``low_var_kl`` limits the last one to +-10 (exponent to +-20)."""
    router_aux_loss_weight: float = Field(default=0.0, ge=0)
    """Mixture of experts: weight of the load-balancing loss, summed over routed layers; an even
    layer has loss 1."""
    router_aux_loss_grouping: Literal["pack", "sequence"] = "pack"
    """Tokens whose experts are balanced together: of one forward, whose size follows from
    ``trainer.micro_batch_tokens``, or of one sample."""
    router_aux_loss_reduction: Literal["token", "response"] = "token"
    """Load balancing: mean over all tokens of the step, prompts included, or mean over samples of
    token means."""
    router_aux_count_source: Literal["executed", "router_selected"] = "executed"
    """Experts that are counted: those that tokens were sent to, or those that the router would have
    chosen; they differ under ``use_rollout_routing_replay``."""
    router_z_loss_weight: float = Field(default=0.0, ge=0)
    """Mixture of experts: weight of the router z-loss, the squared log-sum-exp of router logits,
    summed over routed layers."""
    router_z_loss_reduction: Literal["token", "response"] = "token"
    """Router z-loss: mean over all tokens of the step, or mean over samples of token means."""
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
    lr_schedule: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """Shape after the warm-up; WSD (warm-up, stable, decay) stays at the peak until
    ``lr_wsd_decay_steps`` before the end of the decay."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Linear warm-up: the optimizer step after so many finished ones is the first at the peak."""
    lr_warmup_init: float = Field(default=0.0, ge=0)
    """Learning rate of the first step of the warm-up; at most the learning rate."""
    lr_decay_steps: int | None = Field(default=None, ge=1)
    """Finished optimizer steps at which the floor is reached; default: those of the run."""
    lr_wsd_decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the final decay, with lr_schedule = "WSD"."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Shape of that decay."""
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
