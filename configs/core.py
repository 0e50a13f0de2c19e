"""``[core]``: guards, deadlines, publication, retention."""

from typing import Literal

from pydantic import Field

from configs.section import Section


class CoreSection(Section):
    """``[core]``."""

    max_run_seconds: float | None = Field(default=None, gt=0)
    """Soft deadline: finish at a completed collection after this many wall-clock seconds, the start
    of the fleet included, the making of model and data not."""
    max_policy_lag: int | None = Field(default=None, ge=0)
    """Largest policy version minus behavior version at any optimizer step; default: 6 when fully
    async, else 0. With K steps an update, at least K - 1; from 2K - 1 on the next collection is
    sampled while the trainer works."""
    publication_mode: Literal["barrier", "refresh", "rolling"] = "barrier"
    """How engines take new weights: live requests are sampled again (barrier), go on under the new
    weights (refresh), or finish first, one engine after the other (rolling)."""
    publication_transport: Literal["auto", "disk", "ipc", "nccl"] = "auto"
    """How new weights reach the engines: through a folder in shared memory (disk), as handles of
    the trainer's own memory, which engines on the same GPUs open (ipc), or by broadcast between
    GPUs (nccl). auto: ipc for colocated SGLang engines, nccl for disaggregated ones, else disk."""
    update_weight_buffer_mib: int = Field(default=1024, ge=1)
    """Size of a bucket of ipc and nccl, in MiB: memory of the trainer's GPU while it publishes, and
    for nccl of the engines' as well. A larger tensor has its own bucket."""
    pipeline_observation_interval_s: float = Field(default=5.0, ge=0)
    """Seconds between rows of ``pipeline_occupancy.jsonl`` of a fully async run; 0: none."""
    filter_zero_std_groups: bool = True
    """Replace groups whose rewards all tie by freshly sampled ones before training."""
    reward_zero_truncated: bool = False
    """A response cut at the token limit gets reward 0."""
    max_train_rollout_logprob_abs_diff: float | None = Field(default=None, gt=0)
    """Fail when the mean |trainer - behavior| log-prob gap exceeds this (nats)."""
    scoring_pass_required: bool = False
    """Score every collection in a forward pass of its own before it is trained on. A run with
    several optimizer steps an update or a dropout does so anyway; in others the training forward
    supplies the log-probs before the update."""
    scoring_check_interval: int = Field(default=50, ge=0)
    """Where no pass is required, compare one with the training forward in the first update of a
    process and at every multiple of so many optimizer steps; 0: in the first update only."""
    scoring_check_tolerance: float = Field(default=1e-3, gt=0)
    """Largest mean |scoring pass - training forward| log-prob gap (nats)."""
    diagnostic_interval: int = Field(default=0, ge=0)
    """Optimizer steps between two that record gradient norms by kind of parameter and samples of
    the weights' change; 0: never."""
    replay_diagnostics: bool = False
    """Compare every replayed expert route, layer by layer, with the one in the sample; needs
    training.use_rollout_routing_replay and costs time."""
    checkpoint_keep_last: int | None = Field(default=1, ge=1)
    """Newest committed checkpoints to keep; none keeps all."""
    checkpoint_keep_every: int | None = Field(default=None, ge=1)
    """Keep every checkpoint whose update count is a multiple of this as well."""
    max_context_length: int = Field(default=2048, ge=8)
    """Prompt plus response, in tokens."""
    continue_as_new_updates: int = Field(default=50, ge=1)
    """Updates after which the workflow continues as new, at a checkpoint boundary."""
