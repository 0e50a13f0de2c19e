"""``[evaluation]``: when and how the held-out set is sampled."""

from typing import Literal

from pydantic import Field

from configs.section import Section


class EvaluationSection(Section):
    """``[evaluation]``; needs held-out prompts."""

    mode: Literal["shared", "background"] = "shared"
    """On the run's own engines while training samples wait, or on an engine of its own."""
    interval: int | None = Field(default=None, ge=1)
    """Updates between evaluations; none: only initial and final."""
    initial: bool = True
    """Evaluate before the first update."""
    final: bool = True
    """Evaluate at the actual last update."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Samples per held-out prompt."""
    temperature: float = Field(default=1.0, ge=0)
    """0: greedy."""
    max_response_length: int | None = Field(default=None, ge=1)
    """New tokens at most; default: the training limit."""
    submit_timeout_s: float = Field(default=30.0, gt=0)
    """Background mode: deadline for handing an evaluation over."""
    timeout_s: float = Field(default=10800.0, gt=0)
    """Background mode: deadline of one evaluation, its engine's start included."""
    num_threads: int | None = Field(default=None, ge=1)
    """Background mode: torch threads of the evaluating engine; default: as the training engines."""
