"""Whether a run evaluates, and how: what other modules ask of the run file."""

from configs.run import RunSpec


def has_held_out(spec: RunSpec) -> bool:
    """Whether the run has held-out prompts to evaluate on."""
    return spec.data.eval_prompt_data is not None or any(
        task.eval_count for task in spec.data.tasks
    )


def has_background_evaluation(spec: RunSpec) -> bool:
    """Whether any evaluation starts an engine of its own."""
    section = spec.evaluation
    due = section.initial or section.final or section.interval is not None
    return section.mode == "background" and due and has_held_out(spec)
