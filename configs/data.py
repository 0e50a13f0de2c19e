"""``[data]``: tasks or prompt files, seed, shuffling."""

from typing import Any, Literal

from pydantic import Field

from configs.section import Section


class TaskSpec(Section):
    """One ``[[data.tasks]]``: generated prompts with a verifier."""

    task: str = Field(min_length=1)
    """``gym:NAME`` for a reasoning-gym generator or ``reverse_word``."""
    train_count: int = Field(default=0, ge=0)
    """Training prompts to draw."""
    eval_count: int = Field(default=0, ge=0)
    """Held-out prompts, disjoint from training by question."""
    verifier: Literal["exact", "number", "gym"] | None = None
    """How answers are scored; default: the task's own."""
    prompt_suffix: str = ""
    """Appended to the question before the chat template."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Generator parameters, checked by the generator."""


class DataSection(Section):
    """``[data]``: exactly one of ``tasks`` and ``prompt_data``."""

    tasks: tuple[TaskSpec, ...] = ()
    """Generated tasks."""
    prompt_data: str | None = None
    """JSONL of prompts: ``{"prompt" | "messages", "answer", "verifier"?}`` a line."""
    eval_prompt_data: str | None = None
    """Held-out JSONL; only with ``prompt_data``."""
    verifier: Literal["exact", "number", "gym"] = "exact"
    """Verifier of rows that name none; only with ``prompt_data``."""
    seed: int = Field(default=17, ge=0)
    """Seed of drawing, splitting, shuffling, sampling and initialization."""
    shuffle: bool = True
    """Reshuffle the training rows each epoch."""
