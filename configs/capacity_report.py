"""What a fully async producer may hold and the fleet may serve, as ``perdure plan`` tells it.

Everything is a configured upper bound in samples unless it says groups; nothing is measured.
"""

from collections.abc import Iterator
from typing import Any

from configs.capacity import completed_groups_capacity, concurrent_groups
from configs.run import RunSpec

SCOPE = "configured upper bounds; nothing is measured"


def capacity_report(spec: RunSpec) -> dict[str, Any]:
    """The report as plain JSON; of a run that is not fully async, only that it is none."""
    if not spec.fully_async:
        return {"enabled": False, "warnings": []}
    inference, n = spec.inference, spec.training.samples_per_prompt
    groups, buffered = concurrent_groups(spec), completed_groups_capacity(spec)
    granularity = spec.asynchronous.rollout_submission_granularity
    report = {
        "enabled": True,
        "scope": SCOPE,
        "engines": inference.num_engines,
        "global_http_slots": inference.num_engines * inference.server_concurrency,
        "requested_engine_slots": inference.num_engines * inference.max_running_requests,
        "producer_sample_budget": groups * n,
        "producer_group_budget": groups,
        "submission_granularity": granularity,
        "completed_buffer_groups": buffered,
        "completed_buffer_samples": buffered * n,
        "samples_per_collection": spec.samples_per_collection,
        "samples_per_optimizer_step": spec.samples_per_collection // spec.steps_per_update,
    }
    if granularity == "group":
        report["owned_plus_buffer_samples"] = (groups + buffered) * n
    warnings = [*_serving_warnings(spec, report), *_holding_warnings(spec, report)]
    return report | {"warnings": [{"code": code, "message": text} for code, text in warnings]}


def _serving_warnings(spec: RunSpec, report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Where the producer's budget and the fleet's slots do not fit each other."""
    n, given = spec.training.samples_per_prompt, spec.asynchronous.async_max_concurrent_samples
    budget = report["producer_sample_budget"]
    if given is not None and given % n:
        yield (
            "budget_not_whole_groups",
            f"async.async_max_concurrent_samples {given} is no multiple of "
            f"training.samples_per_prompt {n}; {budget} are used",
        )
    http, engine = report["global_http_slots"], report["requested_engine_slots"]
    if budget < min(http, engine):
        yield (
            "budget_below_serving_slots",
            f"{budget} concurrent samples (async.async_max_concurrent_samples) cannot fill the "
            f"{min(http, engine)} serving slots of the fleet",
        )
    if http < engine:
        yield (
            "http_below_running",
            f"{http} open calls (inference.server_concurrency) leave some of {engine} request "
            "slots (inference.max_running_requests) empty",
        )


def _holding_warnings(spec: RunSpec, report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Where more is held than can be trained before it is too old, or less than a collection."""
    budget, buffered = report["producer_sample_budget"], report["completed_buffer_samples"]
    step, lag = report["samples_per_optimizer_step"], spec.max_policy_lag
    window = (lag + 1) * step
    if buffered < spec.samples_per_collection:
        yield (
            "buffer_below_collection",
            f"{buffered} finished samples may wait "
            "(async.async_data_buffer_capacity_factor), a collection has "
            f"{spec.samples_per_collection}: generation stops there until the trainer asks for one",
        )
    reach = f"{window} samples that core.max_policy_lag {lag} lets the trainer reach in time"
    if buffered > window:
        yield (
            "buffer_above_lag_window",
            f"{buffered} finished samples may wait, more than the {reach}; the rest may go stale",
        )
    if budget > window:
        yield (
            "budget_above_lag_window",
            f"{budget} samples may be in the making, more than the {reach}; the rest may go stale",
        )
    if "owned_plus_buffer_samples" not in report:
        yield (
            "sample_granularity_retains_siblings",
            f"the {budget} samples count unfinished ones only: finished siblings wait for the "
            "slowest of their group on top of them",
        )
    elif report["owned_plus_buffer_samples"] > lag * step:
        yield (
            "owned_above_lag",
            f"{report['owned_plus_buffer_samples']} samples may be in the making or waiting, more "
            f"than the {lag * step} that the trainer takes within core.max_policy_lag {lag}",
        )
