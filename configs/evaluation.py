"""``[evaluation]``: when and how the held-out set is sampled."""

from pydantic import Field

from configs.section import Section


class EvaluationSection(Section):
    """``[evaluation]``; needs held-out prompts."""

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
