"""Checks of a fully async run, and of what only such a run has."""

from collections.abc import Iterator
from typing import Any

from configs.asynchronous import AsyncSection
from configs.capacity import completed_groups_capacity
from configs.core import CoreSection
from configs.inference import InferenceSection
from configs.problem import Problem, shown
from configs.run import RunSpec

_TURN_ON = "set async.fully_async = true or remove the key"


def async_problems(spec: RunSpec) -> Iterator[Problem]:
    """Contradictions between ``[async]`` and the other tables; the batch shape is sound."""
    if not spec.fully_async:
        yield from _without_async(spec)
        return
    yield from _lag(spec)
    yield from _correction(spec)
    yield from _bounds(spec)
    if spec.core.publication_mode != "barrier":
        yield from _live_publication(spec)
    if spec.core.publication_mode == "refresh":
        yield from _refresh(spec)


def _without_async(spec: RunSpec) -> Iterator[Problem]:
    """Values that only a fully async run looks at; the default of a key cannot be told apart."""
    core, inference, section = spec.core, spec.inference, spec.asynchronous
    owned: list[tuple[str, Any, Any]] = [
        (f"async.{name}", getattr(section, name), field.default)
        for name, field in AsyncSection.model_fields.items()
    ]
    owned += [
        (f"core.{name}", getattr(core, name), CoreSection.model_fields[name].default)
        for name in ("publication_mode", "pipeline_observation_interval_s")
    ]
    name = "router_max_queued_requests"
    default = InferenceSection.model_fields[name].default
    owned.append((f"inference.{name}", getattr(inference, name), default))
    for key, value, default in owned:
        if value != default:
            yield Problem(key, "only a fully async run has that", value, _TURN_ON)


def _lag(spec: RunSpec) -> Iterator[Problem]:
    """The queue must be allowed to hold what is sampled while the trainer takes its K steps.

    That is K versions old when its first step begins, and K - 1 more at the last one.
    """
    steps = spec.steps_per_update
    least = 2 * steps - 1
    if steps - 1 <= spec.max_policy_lag < least:
        yield Problem(
            "core.max_policy_lag",
            f"must be at least {least} in a fully async run: {_age(steps)}, so every group that "
            "waits would be too old",
            spec.max_policy_lag,
            f"set it to {least} or more, or set async.fully_async = false",
        )


def _age(steps: int) -> str:
    if steps == 1:
        return "what is sampled during an update is one optimizer step old in the next one"
    return (
        f"what is sampled during an update of {steps} optimizer steps is {steps} steps old at the "
        f"first step of the next one and {2 * steps - 1} at its last"
    )


def _correction(spec: RunSpec) -> Iterator[Problem]:
    if spec.training.use_tis is False and not spec.training.use_rollout_logprobs:
        yield Problem(
            "training.use_tis",
            "a fully async run trains on samples of older policies, which must be corrected",
            False,
            "remove the key or set async.fully_async = false",
        )


def _bounds(spec: RunSpec) -> Iterator[Problem]:
    section, training, inference = spec.asynchronous, spec.training, spec.inference
    group = training.samples_per_prompt
    if section.async_max_concurrent_samples is not None and (
        section.async_max_concurrent_samples < group
    ):
        yield Problem(
            "async.async_max_concurrent_samples",
            f"must hold one group of {group} samples (training.samples_per_prompt)",
            section.async_max_concurrent_samples,
            f"use at least {group}, or remove the key for the automatic bound",
        )
    if completed_groups_capacity(spec) < 1:
        yield Problem(
            "async.async_data_buffer_capacity_factor",
            f"times training.rollout_batch_size ({training.rollout_batch_size}) must be at least "
            "1: no finished group could wait",
            section.async_data_buffer_capacity_factor,
            f"use at least {1 / training.rollout_batch_size:g}",
        )
    if section.max_requeues is not None and section.async_unused_samples_handler == "drop":
        yield Problem(
            "async.max_requeues",
            'says nothing beside async.async_unused_samples_handler = "drop", which drops a stale '
            "group at once",
            section.max_requeues,
            'remove one of the two; "retry" samples the prompt again',
        )
    open_calls = inference.num_engines * inference.server_concurrency
    if inference.router_max_queued_requests < open_calls:
        yield Problem(
            "inference.router_max_queued_requests",
            f"must hold every open call ({inference.num_engines} engines x "
            f"inference.server_concurrency {inference.server_concurrency} = {open_calls}): all of "
            "them may wait while no engine is routable, and the router refuses the rest",
            inference.router_max_queued_requests,
            f"use at least {open_calls}",
        )


def _live_publication(spec: RunSpec) -> Iterator[Problem]:
    if spec.steps_per_update != 1:
        yield Problem(
            "core.publication_mode",
            f"needs one optimizer step an update, not {spec.steps_per_update} "
            "(training.global_batch_size)",
            spec.core.publication_mode,
            'remove training.global_batch_size, or use "barrier"',
        )


def _refresh(spec: RunSpec) -> Iterator[Problem]:
    """A response that goes on under new weights is corrected token by token.

    Its behavior log-probs must therefore be those of the distribution that was sampled.
    """
    inference = spec.inference
    for key, value, neutral in (
        ("temperature", inference.temperature, 1.0),
        ("top_p", inference.top_p, 1.0),
        ("top_k", inference.top_k, -1),
    ):
        if value != neutral and not (key == "top_k" and value == 0):
            yield Problem(
                f"inference.{key}",
                f'must be {neutral:g} with core.publication_mode = "refresh": a response that '
                "several policies made is corrected token by token, by the full distribution",
                value,
                f'use {neutral:g}, or another publication mode such as "barrier"',
            )
    chosen: list[tuple[str, object, object]] = [
        ("use_rollout_logprobs", spec.training.use_rollout_logprobs, False),
        ("advantage_estimator", spec.training.advantage_estimator, "grpo"),
    ]
    for key, choice, needed in chosen:
        if choice != needed:
            yield Problem(
                f"training.{key}",
                f'must be {shown(needed)} with core.publication_mode = "refresh": tokens of one '
                "response come from several policies and are corrected one by one",
                choice,
                f'use {shown(needed)}, or another publication mode such as "barrier"',
            )
