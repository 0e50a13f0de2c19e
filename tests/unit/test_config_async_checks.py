"""Combinations with a fully async run, publication and background evaluation that cannot be."""

from pathlib import Path

import pytest

from configs.load import load_run
from models.errors import ConfigurationError

# 8 prompts x 8 samples, one optimizer step an update
BASE = """
schema_version = 1
name = "a"
[model]
source = "org/name"
[output]
root = "/nowhere/a"
[[data.tasks]]
task = "reverse_word"
train_count = 10
eval_count = 4
"""
NO_HELD_OUT = "data.tasks=[{task='reverse_word', train_count=9}]"
ON = "async.fully_async=true"
REFRESH = 'core.publication_mode="refresh"'
ROLLING = 'core.publication_mode="rolling"'
BACKGROUND = 'evaluation.mode="background"'
TURN_ON = "set async.fully_async = true or remove the key"


@pytest.mark.parametrize(
    ("overrides", "subject", "reason", "remedy"),
    [
        # what only a fully async run has
        (
            ["async.async_max_concurrent_samples=64"],
            "async.async_max_concurrent_samples = 64",
            "only a fully async run",
            TURN_ON,
        ),
        (
            ["async.async_data_buffer_capacity_factor=1.0"],
            "async.async_data_buffer_capacity_factor = 1.0",
            "only a fully async run",
            TURN_ON,
        ),
        (
            ['async.async_unused_samples_handler="drop"'],
            'async.async_unused_samples_handler = "drop"',
            "only a fully async run",
            TURN_ON,
        ),
        (
            ['async.rollout_submission_granularity="group"'],
            'async.rollout_submission_granularity = "group"',
            "only a fully async run",
            TURN_ON,
        ),
        (
            ["async.max_requeues=3"],
            "async.max_requeues = 3",
            "only a fully async run",
            TURN_ON,
        ),
        ([REFRESH], 'core.publication_mode = "refresh"', "only a fully async run", TURN_ON),
        ([ROLLING], 'core.publication_mode = "rolling"', "only a fully async run", TURN_ON),
        (
            ["core.pipeline_observation_interval_s=1.0"],
            "core.pipeline_observation_interval_s = 1.0",
            "only a fully async run",
            TURN_ON,
        ),
        (
            ["inference.router_max_queued_requests=9"],
            "inference.router_max_queued_requests = 9",
            "only a fully async run",
            TURN_ON,
        ),
        # lag
        (
            [ON, "core.max_policy_lag=0"],
            "core.max_policy_lag = 0",
            "is one optimizer step old in the next one, so every group that waits",
            "set it to 1 or more, or set async.fully_async = false",
        ),
        (
            [ON, "core.max_policy_lag=2", "training.global_batch_size=32"],
            "core.max_policy_lag = 2",
            "is 2 steps old at the first step of the next one and 3 at its last",
            "set it to 3 or more",
        ),
        (
            [ON, "core.max_policy_lag=2", "training.global_batch_size=16"],
            "core.max_policy_lag = 2",
            "must be at least 3: the last of 4 optimizer steps",
            "to 7 and more",
        ),
        (
            [ON, "training.global_batch_size=8"],  # K = 8: the default lag of 6 does not do
            "core.max_policy_lag = 6",
            "must be at least 7",
            "to 15 and more",
        ),
        # correction
        (
            [ON, "training.use_tis=false"],
            "training.use_tis = false",
            "older policies",
            "remove the key or set async.fully_async = false",
        ),
        (
            [ON, REFRESH, "training.use_tis=false"],
            "training.use_tis = false",
            "must be corrected",
            "remove the key",
        ),
        # bounds
        (
            [ON, "async.async_max_concurrent_samples=7"],
            "async.async_max_concurrent_samples = 7",
            "must hold one group of 8 samples",
            "use at least 8, or remove the key",
        ),
        (
            [ON, "async.async_data_buffer_capacity_factor=0.124"],
            "async.async_data_buffer_capacity_factor = 0.124",
            "times training.rollout_batch_size (8) must be at least 1",
            "use at least 0.125",
        ),
        (
            [ON, "async.max_requeues=3", 'async.async_unused_samples_handler="drop"'],
            "async.max_requeues = 3",
            "drops a stale group at once",
            "remove one of the two",
        ),
        (
            [ON, "inference.num_engines=2", "inference.router_max_queued_requests=127"],
            "inference.router_max_queued_requests = 127",
            "2 engines x inference.server_concurrency 64 = 128",
            "use at least 128",
        ),
        (
            [ON, "inference.server_concurrency=100", "inference.max_queued_requests=4"],
            "inference.server_concurrency = 100",
            "an engine takes 68 requests",
            "use at most 68",
        ),
        (
            [ON, "training.samples_per_prompt=1"],
            "core.filter_zero_std_groups = true",
            "every group would be dropped",
            "raise training.samples_per_prompt to 2",
        ),
        # publication
        (
            [ON, REFRESH, "training.global_batch_size=32"],
            'core.publication_mode = "refresh"',
            "one optimizer step an update, not 2",
            "remove training.global_batch_size",
        ),
        (
            [ON, ROLLING, "training.global_batch_size=32"],
            'core.publication_mode = "rolling"',
            "one optimizer step an update, not 2",
            'use "barrier"',
        ),
        (
            [ON, REFRESH, "inference.temperature=0.7"],
            "inference.temperature = 0.7",
            'must be 1 with core.publication_mode = "refresh"',
            "use 1, or another publication mode",
        ),
        (
            [ON, REFRESH, "inference.top_p=0.9"],
            "inference.top_p = 0.9",
            'must be 1 with core.publication_mode = "refresh"',
            "use 1, or",
        ),
        (
            [ON, REFRESH, "inference.top_k=40"],
            "inference.top_k = 40",
            'must be -1 with core.publication_mode = "refresh"',
            "use -1, or",
        ),
        (
            [ON, REFRESH, 'training.advantage_estimator="gspo"'],
            'training.advantage_estimator = "gspo"',
            'must be "grpo" with',
            'use "grpo", or another publication mode',
        ),
        (
            [ON, REFRESH, "training.use_rollout_logprobs=true"],
            "training.use_rollout_logprobs = true",
            "must be false with",
            "use false, or another publication mode",
        ),
        # evaluation
        (
            [BACKGROUND, NO_HELD_OUT],
            'evaluation.mode = "background"',
            "no held-out prompts",
            "set eval_count of a task",
        ),
        (
            ["evaluation.submit_timeout_s=5.0"],
            "evaluation.submit_timeout_s = 5.0",
            "only a background evaluation",
            'set evaluation.mode = "background" or remove the key',
        ),
        (
            ["evaluation.timeout_s=5.0"],
            "evaluation.timeout_s = 5.0",
            "only a background evaluation",
            'set evaluation.mode = "background"',
        ),
        (
            ["evaluation.num_threads=1"],
            "evaluation.num_threads = 1",
            "only a background evaluation",
            'set evaluation.mode = "background"',
        ),
    ],
)
def test_refusals_name_key_value_reason_and_remedy(
    tmp_path: Path, overrides: list[str], subject: str, reason: str, remedy: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(BASE)
    with pytest.raises(ConfigurationError) as caught:
        load_run(path, overrides)
    lines = [
        line
        for line in caught.value.message.splitlines()
        if line.startswith(f"{path}: {subject}: ")
    ]
    assert lines, caught.value.message
    said = lines[0].removeprefix(f"{path}: {subject}: ")
    assert reason in said
    assert remedy in said[said.index(reason) + len(reason) :]


@pytest.mark.parametrize(
    "overrides",
    [
        [ON],
        [ON, "core.max_policy_lag=1"],
        [ON, "core.max_policy_lag=3", "training.global_batch_size=32"],
        [ON, "training.use_tis=true"],
        [ON, REFRESH, "inference.deterministic=true"],
        [ON, ROLLING, "inference.temperature=0.7"],
        [ON, ROLLING],  # one engine: warned of, not refused
        [ON, "inference.top_p=0.9"],
        [ON, "async.async_max_concurrent_samples=8"],
        [ON, "async.async_data_buffer_capacity_factor=0.125"],
        [ON, "async.max_requeues=1"],
        [ON, "inference.router_max_queued_requests=64"],
        [ON, BACKGROUND],
        [BACKGROUND, "evaluation.timeout_s=60.0", "evaluation.num_threads=1"],
        # values that say what holds anyway: a resolved file has them all
        ["async.fully_async=false", 'core.publication_mode="barrier"'],
    ],
)
def test_what_is_at_the_edge_is_accepted(tmp_path: Path, overrides: list[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(BASE)
    load_run(path, overrides)


def test_one_mistake_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(BASE)
    for overrides in (
        [ON, "core.max_policy_lag=0"],
        [ON, "core.max_policy_lag=2", "training.global_batch_size=16"],
        [ON, REFRESH, "inference.top_k=0"],
        [REFRESH, "inference.top_p=0.9"],
    ):
        with pytest.raises(ConfigurationError) as caught:
            load_run(path, overrides)
        assert len(caught.value.message.splitlines()) == 1, caught.value.message
