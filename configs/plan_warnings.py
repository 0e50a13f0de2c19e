"""What ``perdure plan`` warns of: settings that are allowed and probably not meant."""

import math
from collections.abc import Iterator

from configs.held_out import has_held_out
from configs.run import RunSpec
from configs.section import Section
from configs.training import TrainingSection
from models.run import LoopPlan

_FREQUENT_SAVE = 5
_FREQUENT_EVAL = 2


def plan_warnings(spec: RunSpec, loop: LoopPlan) -> Iterator[tuple[str, str]]:
    """Every warning as (code, message), in words of the run file."""
    yield from _cadence_warnings(spec, loop)
    yield from _throughput_warnings(spec)
    yield from _sampling_warnings(spec)
    if spec.training.samples_per_prompt == 1:
        yield "no_group_signal", "one sample a prompt has advantage 0: no update changes a weight"
    if spec.optimizer.learning_rate == 0:
        yield "learning_rate_zero", "optimizer.learning_rate is 0: no update changes a weight"
    elif spec.optimizer.lr_warmup_steps and spec.optimizer.lr_warmup_init == 0:
        yield (
            "warmup_from_zero",
            "optimizer.lr_warmup_init is 0: the first optimizer step changes no weight; set it to "
            "learning_rate / (lr_warmup_steps + 1) for steps of equal size from the first one on",
        )
    yield from _loss_warnings(spec)
    for key, condition in _without_effect(spec):
        yield "key_without_effect", f"{key} says nothing {condition}"


def _loss_warnings(spec: RunSpec) -> Iterator[tuple[str, str]]:
    training = spec.training
    if training.kl_loss_coef > 0:
        yield (
            "reference_policy_cost",
            "training.kl_loss_coef keeps a frozen copy of the model and scores every collection "
            "with it",
        )
    if training.dppo_divergence_type is not None and not (
        training.use_rollout_logprobs or spec.steps_per_update > 1
    ):
        remedy = "set training.use_rollout_logprobs"
        if spec.core.publication_mode == "refresh":
            remedy += ' with core.publication_mode = "barrier" or "rolling"'
        yield (
            "mask_never_bites",
            "with one optimizer step an update every ratio is 1, so training.dppo_divergence_type "
            f"masks nothing; {remedy}",
        )
    elif training.dppo_divergence_type == "tv" and training.dppo_threshold >= 1:
        yield (
            "mask_never_bites",
            "total variation is never above 1, so training.dppo_threshold "
            f"{training.dppo_threshold:g} masks nothing",
        )


def _sampling_warnings(spec: RunSpec) -> Iterator[tuple[str, str]]:
    inference = spec.inference
    if inference.top_p < 1 or inference.top_k != -1:
        yield (
            "truncated_sampling",
            "top_p or top_k cuts the distribution that is sampled, while log-probs are of the "
            "full one; importance weights are biased",
        )
    if spec.fully_async and inference.deterministic:
        yield (
            "deterministic_async",
            "inference.deterministic costs speed and repeats nothing in a fully async run: which "
            "policy samples a prompt depends on time",
        )
    if spec.core.publication_mode == "rolling" and inference.num_engines == 1:
        yield (
            "rolling_single_engine",
            "the only engine drains before each publication: nothing is sampled meanwhile; use "
            'core.publication_mode = "refresh" or another engine',
        )


def _cadence_warnings(spec: RunSpec, loop: LoopPlan) -> Iterator[tuple[str, str]]:
    if not loop.save_checkpoints:
        yield "no_checkpoints", "training.save_checkpoints is false: a lost trainer starts over"
    elif loop.save_interval is not None and loop.save_interval >= loop.num_rollouts > 1:
        yield (
            "only_last_checkpoint",
            "the only checkpoint is the last: a lost trainer starts over; set "
            "training.save_interval",
        )
    elif loop.save_interval is not None and loop.save_interval <= _FREQUENT_SAVE:
        yield (
            "frequent_save",
            f"a checkpoint every {loop.save_interval} updates costs training time",
        )
    shared = spec.evaluation.mode == "shared"
    if shared and loop.eval_interval is not None and loop.eval_interval <= _FREQUENT_EVAL:
        yield (
            "frequent_eval",
            f"an evaluation every {loop.eval_interval} updates stops sampling for training",
        )
    never = not loop.eval_initial and not loop.eval_final
    if has_held_out(spec) and never and (loop.eval_interval or math.inf) > loop.num_rollouts:
        yield (
            "never_evaluated",
            "no evaluation is ever due: evaluation.initial and evaluation.final are false, and "
            f"evaluation.interval does not come round within {loop.num_rollouts} updates",
        )


def _throughput_warnings(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Of a run whose collections are asked for; a fully async one has its capacity report."""
    inference, samples = spec.inference, spec.samples_per_collection
    slots = inference.num_engines * inference.max_running_requests
    open_calls = inference.num_engines * inference.server_concurrency
    if spec.fully_async:
        return
    if not spec.overlaps and samples < slots and inference.num_engines > 1:
        yield (
            "sync_collection_underfeeds_fleet",
            f"a sequential collection of {samples} samples cannot fill {slots} request slots; "
            "use fewer engines or raise training.rollout_batch_size",
        )
    if open_calls < min(slots, samples):
        yield (
            "concurrency_below_slots",
            f"{open_calls} open calls (inference.server_concurrency) leave some of {slots} "
            "request slots empty",
        )


def _without_effect(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Keys that hold something, with the condition under which nobody looks at them.

    They are no contradictions: a sweep keeps such a key and turns off what it belongs to.
    """
    training, optimizer = spec.training, spec.optimizer
    pairs: list[tuple[str, Section, str, bool, str]] = [
        (
            "training",
            training,
            "dppo_threshold",
            training.dppo_divergence_type is None,
            "without training.dppo_divergence_type",
        ),
        (
            "training",
            training,
            "kl_loss_type",
            training.kl_loss_coef == 0,
            "while training.kl_loss_coef is 0",
        ),
        *(
            ("training", training, name, weight == 0, f"while training.{key} is 0")
            for name, key, weight in _router_keys(training)
        ),
        ("training", training, "tis_clip", not spec.uses_tis, "without importance weights"),
        ("training", training, "tis_clip_low", not spec.uses_tis, "without importance weights"),
        (
            "optimizer",
            optimizer,
            "lr_wsd_decay_style",
            optimizer.lr_schedule != "WSD",
            'without optimizer.lr_schedule = "WSD"',
        ),
        (
            "optimizer",
            optimizer,
            "min_lr",
            optimizer.lr_schedule == "constant",
            "while the learning rate is constant (optimizer.lr_schedule)",
        ),
    ]
    for table, section, name, idle, condition in pairs:
        default = type(section).model_fields[name].default
        if idle and getattr(section, name) != default:
            yield f"{table}.{name}", condition


def _router_keys(training: TrainingSection) -> Iterator[tuple[str, str, float]]:
    """Keys of auxiliary losses, each with the key that turns its loss on and that one's value."""
    for name in (
        "router_aux_loss_grouping",
        "router_aux_loss_reduction",
        "router_aux_count_source",
    ):
        yield name, "router_aux_loss_weight", training.router_aux_loss_weight
    yield "router_z_loss_reduction", "router_z_loss_weight", training.router_z_loss_weight
