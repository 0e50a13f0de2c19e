"""The workflow's input, exactly as ``temporal workflow start --input-file`` takes it."""

import shlex
from typing import Any

from configs.load import Loaded

CONTROL_QUEUE = "perdure-control"
WORKFLOW_TYPE = "Training"


def run_request(loaded: Loaded) -> dict[str, Any]:
    """The fields of ``models.run.RunRequest`` that a user decides, as plain JSON."""
    return {
        "config": loaded.document,
        "config_sha256": loaded.sha256,
        "config_path": loaded.path,
    }


def start_command(run_id: str, input_file: str) -> str:
    """The stock command line that starts the run from a rendered file."""
    return shlex.join(
        [
            *("temporal", "workflow", "start"),
            *("--type", WORKFLOW_TYPE),
            *("--task-queue", CONTROL_QUEUE),
            *("--workflow-id", run_id),
            *("--id-conflict-policy", "Fail"),
            *("--input-file", input_file),
        ]
    )
