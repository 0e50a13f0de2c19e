"""The run file of a forked run, from that of the run that it is forked from."""

from collections.abc import Iterable, Mapping
from typing import Any

from configs.load import Loaded, resolve_document
from configs.overrides import apply_overrides
from configs.problem import Problem, configuration_error
from configs.run import RunSpec

_FIXED = (
    ("model", "the optimizer's state is that of this model"),
    ("data", "the data cursor walks these prompts in this order"),
    ("core.max_context_length", "the prompts were prepared for it"),
    ("inference.max_response_length", "the prompts were prepared for it"),
    ("evaluation.max_response_length", "the prompts were prepared for it"),
    ("training.samples_per_prompt", "the collections so far have groups of that size"),
)
"""Keys, or whole tables, that a fork takes over; everything else may be set anew."""
_REMEDY = "leave it out of --set, or start a run of its own"


def forked_run(
    recorded: Mapping[str, Any], name: str, root: str, overrides: Iterable[str], updates: int
) -> Loaded:
    """The resolved run file of a run that begins after ``updates`` updates of another.

    Args:
        recorded: the other run's file as it was recorded.
        name: of the new run.
        root: absolute output root of the new run.
        overrides: ``table.key=VALUE`` texts.
        updates: finished updates that the new run begins with.

    Raises:
        ConfigurationError: the result is wrong, or differs where it must not.
    """
    before = resolve_document(recorded, origin="recorded run file")
    own = {**before.document, "name": name}
    own["output"] = {**own["output"], "root": root}
    loaded = resolve_document(apply_overrides(own, overrides), origin="forked run file")
    problems = [
        Problem(key, f"must be as in the run that is forked: {reason}", remedy=_REMEDY)
        for key, reason in _FIXED
        if _at(before, key) != _at(loaded, key)
    ]
    problems += _shape_problems(before.spec, loaded.spec, updates)
    if problems:
        raise configuration_error("forked run file", problems)
    return loaded


def _shape_problems(before: RunSpec, spec: RunSpec, updates: int) -> list[Problem]:
    found = []
    if spec.output.root == before.output.root or spec.name == before.name:
        remedy = "give --to another root and --name another name"
        found.append(Problem("output.root", "is the forked run's own", spec.output.root, remedy))
    if spec.steps_per_update != before.steps_per_update:
        reason = f"must leave {before.steps_per_update} optimizer steps an update, as so far"
        found.append(Problem("training.global_batch_size", reason, spec.training.global_batch_size))
    if spec.training.num_rollouts <= updates:
        reason = f"must be above the {updates} updates that the run begins with"
        found.append(Problem("training.num_rollouts", reason, spec.training.num_rollouts))
    if not spec.launch.auto_resume:
        reason = "must be true: the run begins where another one stopped"
        found.append(Problem("launch.auto_resume", reason, False))
    return found


def _at(loaded: Loaded, key: str) -> Any:
    value: Any = loaded.document
    for part in key.split("."):
        value = value[part]
    return value
