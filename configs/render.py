"""The workflow's input, exactly as ``temporal workflow start --input-file`` takes it."""

from typing import Any

from configs.load import Loaded
from models.checkpoint import RewindRequest

CONTROL_QUEUE = "perdure-control"
WORKFLOW_TYPE = "Training"


def run_request(loaded: Loaded, rewind: RewindRequest | None = None) -> dict[str, Any]:
    """The fields of ``models.run.RunRequest`` that a user decides, as plain JSON."""
    request = {
        "config": loaded.document,
        "config_sha256": loaded.sha256,
        "config_path": loaded.path,
    }
    return request if rewind is None else {**request, "rewind": rewind.model_dump(mode="json")}


def start_words(run_id: str, input_file: str, timeout_s: float | None = None) -> tuple[str, ...]:
    """What follows ``temporal`` in the stock command that starts a run from a rendered file.

    Args:
        run_id: the workflow's id.
        input_file: the rendered file.
        timeout_s: ``launch.timeout_s``.
    """
    limit = () if timeout_s is None else ("--execution-timeout", f"{timeout_s:f}s")
    return (
        *("workflow", "start"),
        *("--type", WORKFLOW_TYPE),
        *("--task-queue", CONTROL_QUEUE),
        *("--workflow-id", run_id),
        *("--id-conflict-policy", "Fail"),
        *("--input-file", input_file),
        *limit,
    )
