"""Checks that need more than one key. Each problem names the key to change and the change.

They hold for resolved files as well: a check never asks whether a key was written, only what it
holds.
"""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from configs.async_checks import async_problems
from configs.credentials import credentials_in
from configs.data import DataSection, TaskSpec
from configs.evaluation import EvaluationSection
from configs.held_out import has_held_out
from configs.hints import nearest
from configs.loss_checks import loss_problems
from configs.model_checks import model_problems
from configs.optimizer_checks import decay_problems, rate_problems
from configs.placement_checks import placement_problems
from configs.problem import Problem
from configs.routing_checks import routing_problems
from configs.run import RunSpec
from configs.sglang_arguments import sglang_problems
from configs.trainer_checks import kernel_problems, process_problems
from configs.transport_checks import transport_problems

_OWN_TASKS = ("reverse_word",)
_OWN_FOLDERS = ("prepared", "rollouts", "checkpoints", "wandb")


def find_problems(spec: RunSpec) -> list[Problem]:
    """Every contradiction between keys of ``spec``, in the order of the file."""
    problems = [
        *model_problems(spec.model, has_tasks=bool(spec.data.tasks)),
        *_data(spec.data),
        *_output(spec),
        *_batches(spec),
        *loss_problems(spec.training),
        *rate_problems(spec.optimizer),
        *_lengths(spec),
        *routing_problems(spec),
        *_engines(spec),
        *sglang_problems(spec),
        *_evaluation(spec),
        *_limits(spec),
        *_credentials(spec),
    ]
    if not spec.samples_per_collection % _batch(spec):
        problems += [
            *process_problems(spec),
            *kernel_problems(spec),
            *decay_problems(spec),
            *_policy_gap(spec),
            *async_problems(spec),
            *placement_problems(spec),
            *transport_problems(spec),
        ]
    return problems


def _batch(spec: RunSpec) -> int:
    return spec.training.global_batch_size or spec.samples_per_collection


def _data(data: DataSection) -> Iterator[Problem]:
    if bool(data.tasks) == (data.prompt_data is not None):
        both = "both are given" if data.tasks else "neither is given"
        yield Problem("data", f"needs exactly one of tasks and prompt_data; {both}")
    if data.prompt_data is None:
        if data.eval_prompt_data is not None:
            yield Problem(
                "data.eval_prompt_data",
                "only goes with prompt_data",
                data.eval_prompt_data,
                "with tasks, set eval_count of a task",
            )
        if data.verifier != "exact":
            yield Problem(
                "data.verifier",
                "only goes with prompt_data",
                data.verifier,
                "with tasks, set verifier in the task",
            )
    for index, task in enumerate(data.tasks):
        yield from _task(f"data.tasks[{index}]", task)
        if task.task in [other.task for other in data.tasks[:index]]:
            yield Problem(
                f"data.tasks[{index}].task",
                "is given twice; sample identities are made from task names",
                task.task,
            )
    if data.tasks and not any(task.train_count for task in data.tasks):
        yield Problem(
            "data.tasks",
            "no task has training prompts",
            remedy="set train_count of one to 1 or more",
        )


def _task(key: str, task: TaskSpec) -> Iterator[Problem]:
    is_gym = re.fullmatch(r"gym:[a-z0-9_]+", task.task) is not None
    if not is_gym and task.task not in _OWN_TASKS:
        close = nearest(task.task, _OWN_TASKS)
        yield Problem(
            f"{key}.task",
            "is not a known task",
            task.task,
            f"did you mean {close!r}?" if close else "write gym:NAME or reverse_word",
        )
    if task.verifier == "gym" and not is_gym:
        yield Problem(
            f"{key}.verifier", f"only gym tasks have a gym verifier, {task.task!r} is none", "gym"
        )
    if not task.train_count and not task.eval_count:
        yield Problem(key, "draws no prompts", remedy="set train_count or eval_count")


def _limits(spec: RunSpec) -> Iterator[Problem]:
    hard_s, soft_s = spec.launch.timeout_s, spec.core.max_run_seconds
    if hard_s is not None and soft_s is not None and hard_s <= soft_s:
        yield Problem(
            "launch.timeout_s",
            f"would end the run before core.max_run_seconds = {soft_s:g} can finish it",
            hard_s,
            "leave room for a start, the running update, a checkpoint, evaluation and export",
        )


def _credentials(spec: RunSpec) -> Iterator[Problem]:
    for key in credentials_in(spec.model_dump(mode="json", by_alias=True)):
        yield Problem(
            key,
            "holds what looks like a credential, and a run file is stored and shown",
            remedy="give it to the workers in their environment instead",
        )


def _output(spec: RunSpec) -> Iterator[Problem]:
    folder = PurePosixPath(spec.output.hf_dir)
    if folder.is_absolute() or ".." in folder.parts or not folder.parts:
        yield Problem(
            "output.hf_dir", "must be a folder inside the output root", spec.output.hf_dir
        )
    elif folder.parts[0] in _OWN_FOLDERS:
        yield Problem(
            "output.hf_dir",
            f"{folder.parts[0]!r} holds the run's own files",
            spec.output.hf_dir,
            "choose another name, such as export-hf",
        )
    if not spec.training.save_checkpoints and spec.training.save_interval is not None:
        yield Problem(
            "training.save_interval",
            "contradicts training.save_checkpoints = false",
            spec.training.save_interval,
            "remove one of the two",
        )


def _batches(spec: RunSpec) -> Iterator[Problem]:
    training, collection = spec.training, spec.samples_per_collection
    batch = training.global_batch_size
    if batch is not None and collection % batch:
        yield Problem(
            "training.global_batch_size",
            f"must divide the {collection} samples of a collection (rollout_batch_size "
            f"{training.rollout_batch_size} x samples_per_prompt {training.samples_per_prompt})",
            batch,
            f"use {_nearest_divisor(collection, batch)}",
        )
    if spec.core.filter_zero_std_groups and training.samples_per_prompt == 1:
        yield Problem(
            "core.filter_zero_std_groups",
            "the only sample of a group always ties with itself, so every group would be dropped",
            True,
            "raise training.samples_per_prompt to 2 or more, or set the filter to false",
        )


def _policy_gap(spec: RunSpec) -> Iterator[Problem]:
    steps = spec.steps_per_update
    if spec.max_policy_lag < steps - 1:
        yield Problem(
            "core.max_policy_lag",
            f"must be at least {steps - 1}: the last of {steps} optimizer steps of an update "
            f"trains on samples that are {steps - 1} steps old",
            spec.max_policy_lag,
            f"set it to {steps - 1} (sequential), or to {2 * steps - 1} and more (overlapped or "
            "fully async)",
        )
    corrected = spec.uses_tis or spec.training.use_rollout_logprobs
    if spec.overlaps and not corrected:
        yield Problem(
            "training.use_tis",
            f"collections overlap with training (core.max_policy_lag {spec.max_policy_lag} "
            f">= {2 * steps - 1}), so behavior differs from the trained policy and must be "
            "corrected",
            False,
            "remove the key or lower core.max_policy_lag",
        )


def _lengths(spec: RunSpec) -> Iterator[Problem]:
    context = spec.core.max_context_length
    longest = spec.longest_row
    if longest > spec.trainer.micro_batch_tokens:
        without = " without its last token" if longest < context else ""
        yield Problem(
            "trainer.micro_batch_tokens",
            f"must hold one sample: core.max_context_length ({context}){without}",
            spec.trainer.micro_batch_tokens,
            f"use at least {longest}, or lower core.max_context_length",
        )
    for key, length in (
        ("inference.max_response_length", spec.inference.max_response_length),
        ("evaluation.max_response_length", spec.evaluation.max_response_length),
    ):
        if length is not None and length >= context:
            yield Problem(
                key,
                f"must leave room for the prompt in core.max_context_length ({context})",
                length,
            )


def _engines(spec: RunSpec) -> Iterator[Problem]:
    inference = spec.inference
    if inference.top_k == 0:
        yield Problem("inference.top_k", "must be positive, or -1 for off", 0)
    room, sum_of = inference.max_queued_requests, "max_queued_requests"
    if inference.engine == "native":
        room += inference.max_running_requests
        sum_of = "max_running_requests + max_queued_requests"
    # SGLang counts every request that arrives as queued, also when it could run at once.
    if inference.server_concurrency > room:
        yield Problem(
            "inference.server_concurrency",
            f"an engine takes {room} requests at once ({sum_of}) and refuses the rest",
            inference.server_concurrency,
            f"use at most {room}",
        )


def _evaluation(spec: RunSpec) -> Iterator[Problem]:
    evaluation = spec.evaluation
    if not has_held_out(spec):
        wants = "set eval_count of a task or data.eval_prompt_data, or remove the key"
        for name in (
            "mode",
            "interval",
            "samples_per_prompt",
            "temperature",
            "max_response_length",
        ):
            yield from _given(
                evaluation, name, "there are no held-out prompts to evaluate on", wants
            )
    if evaluation.mode == "shared":
        wants = 'set evaluation.mode = "background" or remove the key'
        for name in ("submit_timeout_s", "timeout_s", "num_threads"):
            yield from _given(evaluation, name, "only a background evaluation has that", wants)


def _given(evaluation: EvaluationSection, name: str, reason: str, remedy: str) -> Iterator[Problem]:
    """A problem when the key holds anything but its default."""
    value = getattr(evaluation, name)
    if value != EvaluationSection.model_fields[name].default:
        yield Problem(f"evaluation.{name}", reason, value, remedy)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _nearest_divisor(number: int, wish: int) -> int:
    return min(_divisors(number), key=lambda divisor: (abs(divisor - wish), -divisor))
