"""Recorded workflow histories: cleaned of where they were recorded, small, replayable."""

import base64
import json
import re
from pathlib import Path
from typing import Any

from temporalio.client import WorkflowHistory

_PROCESS = re.compile(r"^\d+@.*")
"""How the SDK names processes and their sticky queues: pid and host."""


def write_history(history: WorkflowHistory, target: Path, root: Path) -> None:
    """Write ``history`` with paths below ``root``, host names and stack traces taken out."""
    cleaned = _clean(json.loads(history.to_json()), str(root))
    target.write_text(json.dumps(cleaned, separators=(",", ":")) + "\n")


def read_history(path: Path) -> WorkflowHistory:
    """A recorded history; the name of the file serves as the workflow's id."""
    return WorkflowHistory.from_json(f"train/{path.stem}", path.read_text())


def _clean(value: Any, root: str) -> Any:
    if isinstance(value, list):
        return [_clean(each, root) for each in value]
    if isinstance(value, str):
        return _PROCESS.sub("worker", value.replace(root, "/data/run"))
    if not isinstance(value, dict):
        return value
    cleaned = {key: _clean(each, root) for key, each in value.items() if key != "stackTrace"}
    if "identity" in cleaned:
        cleaned["identity"] = "worker"
    if isinstance(cleaned.get("data"), str) and "metadata" in cleaned:
        text = base64.b64decode(cleaned["data"]).decode()
        cleaned["data"] = base64.b64encode(text.replace(root, "/data/run").encode()).decode()
    return cleaned
