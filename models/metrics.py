"""Every metric that Perdure reports: name, unit, axis. Undeclared names are refused.

A name that ends in ``/*`` declares a family (for example one counter a drop reason).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from models.errors import ContractViolation


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    unit: str
    axis: str
    """The step key that it is plotted against."""
    meaning: str


_UPDATE = "train/step"
_ROLLOUT = "rollout/step"
_EVAL = "eval/step"
_ERRORS = "errors/elapsed_seconds"
_ASYNC = "rollout/fully_async/"
_QUEUE = f"{_ASYNC}completed_queue/"
_SCORE = "collection_score_"
_SIBLINGS = "rollout/siblings/consumed/"

METRICS: tuple[Metric, ...] = (
    # training, one row an update (axis: completed optimizer steps - 1)
    Metric("train/step", "steps", _UPDATE, "completed optimizer steps - 1"),
    Metric("train/completed_steps", "steps", _UPDATE, "policy version after the update"),
    Metric("train/published_step", "steps", _UPDATE, "policy version last exported; -1: none"),
    Metric("train/rollout_id", "index", _UPDATE, "update index"),
    Metric("train/loss", "1", _UPDATE, "loss as optimized, mean over optimizer steps"),
    Metric("train/policy_objective", "1", _UPDATE, "the loss without auxiliary terms of routers"),
    Metric("train/auxiliary_load_balancing", "1", _UPDATE, "weighted part of the loss, routers"),
    Metric("train/auxiliary_router_z", "1", _UPDATE, "weighted part of the loss, routers"),
    Metric("train/pg_loss", "1", _UPDATE, "policy-gradient part of the loss"),
    Metric("train/kl_loss", "nats", _UPDATE, "KL estimate against the reference, as weighed"),
    Metric("train/entropy_loss", "nats", _UPDATE, "mean token entropy"),
    Metric("train/pg_clipfrac", "fraction", _UPDATE, "active tokens on the clipped branch"),
    Metric("train/ppo_kl", "nats", _UPDATE, "mean of old - new log-prob"),
    Metric("train/ois", "1", _UPDATE, "mean ratio of new to anchor probability"),
    Metric("train/ess_ratio", "fraction", _UPDATE, "effective sample size of new/old ratios"),
    Metric("train/grad_norm", "1", _UPDATE, "global norm before clipping, last step"),
    Metric("train/parameter_change", "1", _UPDATE, "L2 norm of the parameter step, last step"),
    *(
        Metric(
            f"train/rank0_local_pre_optimizer/{kind}/l2",
            "1",
            _UPDATE,
            f"gradient norm of {kind} parameters on rank 0, last diagnostic step",
        )
        for kind in ("dense", "expert", "router")
    ),
    Metric("train/lr_used-pg_0", "1", _UPDATE, "learning rate of the last optimizer step"),
    Metric("train/lr-pg_0", "1", _UPDATE, "learning rate of the next optimizer step"),
    Metric("train/train_rollout_logprob_abs_diff", "nats", _UPDATE, "mean |trainer - behavior|"),
    Metric("train/train_rollout_kl", "nats", _UPDATE, "mean of behavior - trainer log-prob"),
    Metric("train/tis", "1", _UPDATE, "mean importance weight before truncation"),
    Metric("train/tis_abs", "1", _UPDATE, "mean |weight - 1|"),
    Metric("train/tis_clipfrac", "fraction", _UPDATE, "weights changed by the truncation"),
    Metric("train/step_seconds", "s", _UPDATE, "wall seconds of the update, slowest trainer rank"),
    Metric("train/cpu_seconds", "s", _UPDATE, "process seconds of the update in the trainer"),
    Metric("train/model_tokens", "tokens", _UPDATE, "tokens that went through the model"),
    Metric("train/active_response_tokens", "tokens", _UPDATE, "response tokens in the loss"),
    Metric("train/model_tokens_per_second", "tokens/s", _UPDATE, "model tokens / step seconds"),
    Metric("train/model_tokens_per_gpu_second", "tokens/s", _UPDATE, "of one trainer rank"),
    Metric("train/active_response_tokens_per_gpu_second", "tokens/s", _UPDATE, "of one rank"),
    Metric("train/packing/packs_per_rank", "packs", _UPDATE, "forward-backward passes of a rank"),
    Metric("train/packing/samples_per_pack", "samples", _UPDATE, "mean over packs"),
    Metric("train/packing/tokens_per_pack", "tokens", _UPDATE, "model tokens, mean over packs"),
    Metric(
        "train/packing/expert_dispatch_skew_mean",
        "1",
        _UPDATE,
        "busiest / mean expert of a pack, summed over layers; mean over packs, last step",
    ),
    Metric("train/packing/expert_dispatch_skew_max", "1", _UPDATE, "of the worst pack, last step"),
    Metric("train/packing/rank0_peak_allocated_bytes", "bytes", _UPDATE, "of the accelerator"),
    Metric("train/memory/estimated_bytes", "bytes", _UPDATE, "expected of rank 0's accelerator"),
    Metric("train/memory/peak_reserved_bytes", "bytes", _UPDATE, "with the allocator's reserve"),
    Metric("train/memory/peak_to_estimate", "1", _UPDATE, "allocated at the peak / expected"),
    *(
        Metric(f"train/moe/{name}", unit, _UPDATE, f"{meaning}; training forwards, last step")
        for name, unit, meaning in (
            ("max_expert_load", "tokens", "most tokens of one expert of a layer"),
            ("dead_experts", "experts", "experts without tokens, all layers"),
            ("dead_experts_max_per_layer", "experts", "experts without tokens, worst layer"),
            ("load_cv_mean", "1", "std / mean of the experts' tokens, mean over layers"),
            ("load_cv_max", "1", "std / mean of the experts' tokens, worst layer"),
            ("max_mean_load_ratio", "1", "largest / mean of the experts' tokens, worst layer"),
            ("replica_load_cv_max", "1", "std / mean, worst layer of any replica"),
            ("replica_max_mean_load_ratio", "1", "largest / mean, worst layer of any replica"),
            ("replica_dead_experts_max_per_layer", "experts", "worst layer of any replica"),
        )
    ),
    Metric("train/optimizer_steps", "steps", _UPDATE, "optimizer steps of this update"),
    Metric("train/no_signal", "bool", _UPDATE, "1 when every group tied and nothing was stepped"),
    Metric("train/mixed_reward_groups", "groups", _UPDATE, "groups with a policy gradient"),
    Metric("train/resident_bytes", "bytes", _UPDATE, "resident memory of the trainer"),
    Metric("train/lag", "steps", _UPDATE, "policy version minus oldest behavior version"),
    Metric("train/refresh/mixed_responses", "samples", _UPDATE, "of more than one version"),
    Metric(
        "train/refresh/current_version_token_fraction",
        "fraction",
        _UPDATE,
        "active tokens that the policy before the update sampled",
    ),
    *(
        Metric(f"train/refresh/{kind}/{name}", unit, _UPDATE, f"{meaning}, {tokens}")
        for kind, tokens in (
            ("historical_prefix", "tokens older than their response's last one"),
            ("latest_forward", "tokens of the version that ended their response"),
        )
        for name, unit, meaning in (
            ("tokens", "tokens", "active tokens"),
            ("mean_abs_logratio", "nats", "mean |trainer - behavior|"),
            ("max_abs_logratio", "nats", "largest |trainer - behavior|"),
            ("tis_clip_fraction", "fraction", "weights changed by the truncation"),
        )
    ),
    Metric("train/collection_score_mean_abs", "nats", _UPDATE, "mean |trainer - behavior|, scored"),
    Metric("train/collection_score_active_tokens", "tokens", _UPDATE, "tokens of that mean"),
    Metric("train/collection_score_max_abs", "nats", _UPDATE, "largest |trainer - behavior|"),
    *(
        Metric(f"train/{_SCORE}{name}{suffix}", unit, _UPDATE, meaning)
        for name in ("p50_upper", "p95_upper", "p99_upper")
        for suffix, unit, meaning in (
            ("", "nats", "upper edge of the percentile's bin of |trainer - behavior|"),
            ("_overflow", "bool", "1 when the percentile is above the last edge"),
        )
    ),
    Metric("advantages/max", "1", _UPDATE, "largest advantage"),
    Metric("advantages/min", "1", _UPDATE, "smallest advantage"),
    Metric("advantages/max_abs", "1", _UPDATE, "largest absolute advantage"),
    Metric("advantages/top_response_share", "fraction", _UPDATE, "largest |A| / sum of |A|"),
    # rollouts, one row a collection
    Metric("rollout/step", "index", _ROLLOUT, "update index of the collection"),
    Metric("rollout/reward", "1", _ROLLOUT, "mean reward of the samples with a score"),
    Metric("rollout/response_len/mean", "tokens", _ROLLOUT, "mean response length"),
    Metric("rollout/response_len/median", "tokens", _ROLLOUT, "median response length"),
    Metric("rollout/response_len/min", "tokens", _ROLLOUT, "shortest response"),
    Metric("rollout/response_len/max", "tokens", _ROLLOUT, "longest response"),
    Metric("rollout/repetition_frac", "fraction", _ROLLOUT, "long responses that end repeating"),
    Metric("rollout/truncated_ratio", "fraction", _ROLLOUT, "responses cut at the token limit"),
    Metric("rollout/mixed_reward_groups", "groups", _ROLLOUT, "groups with unequal rewards"),
    Metric("rollout/dynamic_filter/*", "groups", _ROLLOUT, "groups filtered, by reason"),
    Metric("rollout/zero_std/ratio", "fraction", _ROLLOUT, "sampled groups whose rewards all tie"),
    Metric("rollout/zero_std/*", "groups", _ROLLOUT, "count_R: sampled groups that tie at R"),
    Metric("rollout/error_verdicts", "samples", _ROLLOUT, "samples whose verifier failed"),
    Metric("rollout/invalid_verdicts", "samples", _ROLLOUT, "answers that could not be read"),
    Metric("rollout/requeued_groups", "groups", _ROLLOUT, "group attempts requeued after a fault"),
    Metric("rollout/seconds", "s", _ROLLOUT, "first submission to commit"),
    Metric("rollout/response_tokens_per_second", "tokens/s", _ROLLOUT, "delivered tokens / s"),
    Metric("rollout/prefix_cache_hit_rate", "fraction", _ROLLOUT, "input tokens engines had"),
    Metric("rollout/weight_version/mean", "steps", _ROLLOUT, "oldest one of a sample, mean"),
    Metric("rollout/weight_version/median", "steps", _ROLLOUT, "oldest one of a sample, median"),
    Metric("rollout/weight_version/min", "steps", _ROLLOUT, "oldest behavior version"),
    Metric("rollout/weight_version/max", "steps", _ROLLOUT, "newest behavior version"),
    Metric(
        "rollout/weight_version/mixed_version_ratio",
        "fraction",
        _ROLLOUT,
        "responses of more than one behavior version",
    ),
    Metric("rollout/max_requeues", "count", _ROLLOUT, "most requeues of any one prompt draw"),
    Metric("perf/rollout_time", "s", _ROLLOUT, "first submission to commit"),
    Metric("perf/tokens_per_gpu_per_sec", "tokens/s", _ROLLOUT, "delivered, of one engine GPU"),
    # the queue of finished groups of a fully async run, over the window since the last collection
    Metric(f"{_ASYNC}queue_size", "groups", _ROLLOUT, "finished groups that wait"),
    Metric(f"{_ASYNC}aborted_groups_filtered", "groups", _ROLLOUT, "canceled before they ended"),
    Metric(f"{_ASYNC}stale_groups_filtered", "groups", _ROLLOUT, "older than the age limit"),
    Metric(f"{_ASYNC}avg_staleness", "steps", _ROLLOUT, "mean age of the delivered groups"),
    Metric(f"{_ASYNC}max_staleness", "steps", _ROLLOUT, "greatest age of a delivered group"),
    Metric(f"{_ASYNC}buffer_avg_staleness", "steps", _ROLLOUT, "mean age of what waits"),
    Metric(f"{_ASYNC}buffer_max_staleness", "steps", _ROLLOUT, "greatest age of what waits"),
    Metric(f"{_ASYNC}rejected_policy_groups", "groups", _ROLLOUT, "not of a legal version"),
    Metric(f"{_ASYNC}rejected_incomplete_groups", "groups", _ROLLOUT, "samples were missing"),
    Metric(f"{_ASYNC}rejected_mixed_policy_groups", "groups", _ROLLOUT, "of several versions"),
    Metric(f"{_ASYNC}max_stale_requeues", "count", _ROLLOUT, "most times that a prompt went stale"),
    Metric(f"{_QUEUE}dropped_groups", "groups", _ROLLOUT, "left the queue, not into training"),
    Metric(f"{_QUEUE}dropped_samples", "samples", _ROLLOUT, "their samples"),
    Metric(f"{_QUEUE}dropped_response_tokens", "tokens", _ROLLOUT, "their response tokens"),
    Metric(f"{_QUEUE}delivered_groups", "groups", _ROLLOUT, "went into a collection"),
    Metric(f"{_QUEUE}delivered_samples", "samples", _ROLLOUT, "their samples"),
    Metric(f"{_QUEUE}delivered_response_tokens", "tokens", _ROLLOUT, "their response tokens"),
    Metric(f"{_QUEUE}dropped_groups_fraction", "fraction", _ROLLOUT, "dropped / both"),
    Metric(f"{_QUEUE}dropped_samples_fraction", "fraction", _ROLLOUT, "dropped / both"),
    Metric(f"{_QUEUE}dropped_response_tokens_fraction", "fraction", _ROLLOUT, "dropped / both"),
    Metric(f"{_QUEUE}dropped_samples_by_length/*", "samples", _ROLLOUT, "by response tokens"),
    Metric(f"{_QUEUE}dropped_samples_by_age/*", "samples", _ROLLOUT, "by age in steps"),
    Metric(f"{_QUEUE}delivered_samples_by_length/*", "samples", _ROLLOUT, "by response tokens"),
    Metric(f"{_QUEUE}delivered_samples_by_age/*", "samples", _ROLLOUT, "by age in steps"),
    Metric(f"{_QUEUE}dropped_samples_fraction_by_length/*", "fraction", _ROLLOUT, "of each bin"),
    Metric(f"{_QUEUE}dropped_samples_fraction_by_age/*", "fraction", _ROLLOUT, "of each bin"),
    Metric(f"{_QUEUE}consumer_wait_seconds", "s", _ROLLOUT, "the collection waited for groups"),
    Metric(f"{_SIBLINGS}groups", "groups", _ROLLOUT, "groups whose samples were timed"),
    Metric(f"{_SIBLINGS}group_seconds_mean", "s", _ROLLOUT, "first begin to last end, mean"),
    Metric(f"{_SIBLINGS}group_seconds_max", "s", _ROLLOUT, "first begin to last end, longest"),
    Metric(f"{_SIBLINGS}sample_seconds_max", "s", _ROLLOUT, "longest sampling of one response"),
    Metric(f"{_SIBLINGS}retained_seconds_mean", "s", _ROLLOUT, "waits for the slowest, a group"),
    Metric(f"{_SIBLINGS}retained_fraction", "fraction", _ROLLOUT, "waits / waits and sampling"),
    # evaluation
    Metric("eval/step", "index", _EVAL, "completed updates"),
    Metric("eval/checkpoint_update", "index", _EVAL, "completed updates of the snapshot"),
    Metric("eval/*", "1", _EVAL, "NAME: mean reward of a held-out set; figures beside it"),
    # serving errors, own axis in seconds
    Metric("errors/elapsed_seconds", "s", _ERRORS, "seconds since the producer started"),
    Metric("errors/completed_group_attempts", "groups", _ERRORS, "cumulative, ok and failed"),
    Metric("errors/requeued_groups", "groups", _ERRORS, "cumulative failed attempts"),
    Metric("errors/window_group_attempts", "groups", _ERRORS, "attempts in the last 5 minutes"),
    Metric("errors/window_failed_groups", "groups", _ERRORS, "failures in the last 5 minutes"),
    Metric("errors/failure_fraction_5m", "fraction", _ERRORS, "failed share of the window"),
    Metric("errors/high_failure_seconds", "s", _ERRORS, "length of the current >= 50 % interval"),
    Metric("errors/transport_groups", "groups", _ERRORS, "connection lost"),
    Metric("errors/overload_groups", "groups", _ERRORS, "429, queue full, priority eviction"),
    Metric("errors/unavailable_groups", "groups", _ERRORS, "no healthy engine"),
    Metric("errors/timeout_groups", "groups", _ERRORS, "a generation deadline passed"),
    Metric("errors/fatal", "bool", _ERRORS, "1 on a terminal producer failure"),
    # publication and control plane
    Metric("publication/*", "s", _UPDATE, "split of the publication times"),
    Metric("control/*", "1", _UPDATE, "seconds and shares of the control plane"),
)

_EXACT = frozenset(metric.name for metric in METRICS if not metric.name.endswith("/*"))
_FAMILIES = tuple(metric.name[:-1] for metric in METRICS if metric.name.endswith("/*"))


_BESIDE_EVAL = ("-truncated_ratio", "-none_reward_ratio")


def is_mean_reward(name: str) -> bool:
    """Whether ``name`` is a held-out set's mean reward, not a counter or a figure beside it."""
    is_section = name.startswith("eval/") and name.count("/") == 1
    return is_section and name not in _EXACT and not name.endswith(_BESIDE_EVAL)


def is_declared(name: str) -> bool:
    """Whether ``name`` is a row of the table or belongs to a declared family."""
    return name in _EXACT or name.startswith(_FAMILIES)


def refuse_undeclared(metrics: Mapping[str, float] | Iterable[str]) -> None:
    """Raise ``ContractViolation`` naming every metric that the table does not declare."""
    unknown = sorted(name for name in metrics if not is_declared(name))
    if unknown:
        raise ContractViolation(
            f"undeclared metrics {unknown}: add a row to models/metrics.py with unit and axis"
        )
