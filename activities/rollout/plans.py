"""How groups of a run are sampled, and how long its stages wait for engines."""

from activities.rollout.attempt import SamplingPlan
from configs.run import RunSpec


def engine_wait_s(spec: RunSpec) -> float:
    """How long a stage waits for engines: one may be starting and loading weights."""
    return spec.inference.start_timeout_s + spec.inference.update_timeout_s


def training_plan(spec: RunSpec) -> SamplingPlan:
    """How training groups are sampled."""
    inference = spec.inference
    return SamplingPlan(
        purpose="train",
        samples_per_prompt=spec.training.samples_per_prompt,
        temperature=inference.temperature,
        top_p=inference.top_p,
        top_k=inference.top_k,
        max_response_length=inference.max_response_length,
        max_context_length=spec.core.max_context_length,
        reward_zero_truncated=spec.core.reward_zero_truncated,
        seed=spec.data.seed,
        request_timeout_s=inference.request_timeout_s,
        engine_wait_s=engine_wait_s(spec),
        routed_experts=spec.training.use_rollout_routing_replay,
    )


def evaluation_plan(spec: RunSpec) -> SamplingPlan:
    """How held-out groups are sampled: their own temperature and length, no truncation rule."""
    evaluation, inference = spec.evaluation, spec.inference
    return SamplingPlan(
        purpose="eval",
        samples_per_prompt=evaluation.samples_per_prompt,
        temperature=evaluation.temperature,
        top_p=1.0,
        top_k=-1,
        max_response_length=evaluation.max_response_length or inference.max_response_length,
        max_context_length=spec.core.max_context_length,
        reward_zero_truncated=False,
        seed=spec.data.seed,
        request_timeout_s=inference.request_timeout_s,
        engine_wait_s=engine_wait_s(spec),
    )


def filters_ties(spec: RunSpec) -> bool:
    """Whether groups whose rewards all tie are replaced; a single sample always ties."""
    return spec.core.filter_zero_std_groups and spec.training.samples_per_prompt > 1
