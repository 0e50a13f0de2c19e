"""Scheduled retraining: which run files and requests fit, and the run of one firing."""

import math
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from configs.hints import nearest
from configs.load import Loaded, document_sha256, resolve_document, resolve_input
from configs.paths import is_url
from configs.problem import Problem, configuration_error
from configs.run import RunSpec
from models.retraining import METRICS, RetrainingRequest

CHANGED = ("name", "output.root", "model.source", "data.prompt_data")
"""Keys of the run file that each firing sets itself."""


def require_usable(request: RetrainingRequest) -> Loaded:
    """The run file of ``request``, resolved.

    Raises:
        ConfigurationError: anything that would make every firing fail or promote without a basis.
    """
    origin = request.config_path or "config"
    remedy = "perdure schedule render RUN.toml"
    loaded = resolve_input(request.config, request.config_sha256, origin, remedy)
    problems = [*_run_file(loaded.spec), *_request(request)]
    if problems:
        raise configuration_error(origin, problems)
    return loaded


def run_of_firing(loaded: Loaded, *, name: str, root: str, model: str, data: str) -> Loaded:
    """The run file of one firing: everything as in ``loaded`` but the keys of ``CHANGED``."""
    document: dict[str, Any] = {
        **loaded.document,
        "name": name,
        "output": {**loaded.document["output"], "root": root},
        "data": {**loaded.document["data"], "prompt_data": data},
    }
    if model != loaded.spec.model.source:
        document["model"] = {**loaded.document["model"], "source": model, "tiny": None}
    return resolve_document(document, origin=loaded.path)


def request_sha256(request: RetrainingRequest) -> str:
    """Digest of what a firing is asked for; where the run file lies does not count.

    Defaults are left out, so that an option of a later version does not change it.
    """
    asked: Mapping[str, Any] = request.model_dump(
        mode="json", exclude={"config_path", "config_sha256"}, exclude_defaults=True
    )
    return document_sha256(asked)


def _run_file(spec: RunSpec) -> Iterator[Problem]:
    if spec.data.tasks:
        yield Problem(
            "data.tasks",
            "a firing trains on the files that it finds, not on generated prompts",
            remedy="set data.prompt_data (each firing replaces it) and data.eval_prompt_data",
        )
    elif spec.data.eval_prompt_data is None:
        yield Problem(
            "data.eval_prompt_data",
            "there are no held-out prompts, so a promotion would have no basis",
            remedy="name a JSONL file of prompts that no firing trains on",
        )
    needed = "a promotion compares the run's initial evaluation, of its parent, with its final one"
    for key in ("initial", "final"):
        if not getattr(spec.evaluation, key):
            yield Problem(f"evaluation.{key}", needed, False, "set it to true")
    if spec.evaluation.mode != "shared":
        yield Problem(
            "evaluation.mode",
            "an evaluation in background may be skipped, and then nothing could be decided",
            spec.evaluation.mode,
            'set it to "shared"',
        )
    if not spec.output.export_hf:
        yield Problem(
            "output.export_hf", "without an export there is nothing to promote", False,
            "set it to true",
        )  # fmt: skip


def _request(request: RetrainingRequest) -> Iterator[Problem]:
    if not request.data:
        yield Problem("data", "no pattern of new data is given", remedy="name one, with --data")
    for pattern in request.data:
        if not is_url(pattern) and not PurePosixPath(pattern).is_absolute():
            yield Problem("data", "must be an absolute path or a URL", pattern)
    if request.metric not in METRICS:
        close = nearest(request.metric, METRICS)
        hint = f"did you mean {close!r}? " if close else ""
        yield Problem(
            "metric", "no figure that a promotion can be decided by", request.metric,
            f"{hint}known: {', '.join(METRICS)}",
        )  # fmt: skip
    if not math.isfinite(request.tolerance):
        yield Problem("tolerance", "must be a finite number", str(request.tolerance))
    if not 0 <= request.max_unscored_fraction <= 1:
        yield Problem(
            "max_unscored_fraction", "must be a share from 0 to 1", request.max_unscored_fraction
        )
