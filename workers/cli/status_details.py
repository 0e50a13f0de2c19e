"""What ``status`` adds for one run: its files beside the server's word, and current attempts."""

import asyncio
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from activities.storage import layout
from configs.compare import differences, recorded_identity
from configs.load import Loaded
from workers.cli import artifacts
from workers.cli.display import duration
from workers.cli.launches import read_receipt, receipt_path
from workers.cli.names import PREFIX
from workers.cli.place import Place
from workers.cli.server import connect_to, look
from workers.cli.status_attempts import attempts_of

_FILE_KEYS = ("status", "update", "attempt", "epoch", "error", "spec_sha256", "run_id")


async def add_details(run: dict[str, Any], place: Place | None, loaded: Loaded | None) -> None:
    """Complete a run of the overview in place.

    Raises:
        ServiceUnreachable: the server of ``place`` did not answer.
    """
    client = None if place is None else await connect_to(place)
    view = None if client is None else await look(client, run["run_id"])
    submitted = None if view is None else view.memo.get("identity_sha256")
    files = await asyncio.to_thread(_files, run["root"])
    run["workflow_json"] = {key: files["state"].get(key) for key in _FILE_KEYS}
    run["warnings"] = [] if view is None else warnings_of(run, files, submitted)
    identity = submitted or files["identity"]
    run["identity_sha256"] = identity
    run["config_matches_submission"] = None if loaded is None else loaded.identity == identity
    if loaded is not None and loaded.identity != identity and files["document"]:
        run["config_differs"] = differences(files["document"], loaded)
    await asyncio.to_thread(_add_receipt, run, identity)
    is_local = place is not None and place.stack is not None
    run["attempts"] = await attempts_of(client, run, is_local=is_local)


def from_files(root: str) -> dict[str, Any]:
    """A run of the overview as its files tell it; no server is asked."""
    state = _object(root, layout.WORKFLOW_JSON)
    newest = artifacts.last_row(root, layout.UPDATES)
    training = _object(root, layout.RESOLVED_CONFIG).get("training") or {}
    return {
        "run_id": str(state.get("run_id", "")),
        "state": str(state.get("status", "unknown")),
        "paused": False,
        "update": int(state.get("update", 0)),
        "total": int(training.get("num_rollouts", 0)),
        "policy_version": int(newest.get("policy_version", 0)),
        "stage": "by its files",
        "pipeline": None,
        "root": root,
        "error": state.get("error"),
        "actors": [],
    }


def _add_receipt(run: dict[str, Any], identity: str | None) -> None:
    """What was launched from here, and whether it is what ``identity`` means."""
    path = receipt_path(run["run_id"].removeprefix(PREFIX), run["root"])
    receipt = read_receipt(path)
    run["receipt"] = None if receipt is None else str(path)
    run["config_matches_receipt"] = None
    if receipt is None:
        return
    launched = receipt.get("identity_sha256")
    run["config_matches_receipt"] = launched == identity
    if identity is not None and launched != identity:
        run["warnings"].append(f"{path} was launched as {launched}, this run means {identity}")


def warnings_of(run: dict[str, Any], files: dict[str, Any], submitted: str | None) -> list[str]:
    """Where the files of a run differ from what its server says."""
    state, where = files["state"], f"{run['root']}/{layout.WORKFLOW_JSON}"
    if not state:
        return [f"{where} cannot be read; Temporal says {run['state']}"]
    found = []
    if state.get("run_id") != run["run_id"]:
        found.append(f"{where} belongs to {state.get('run_id')}, another run owns this root")
    if state.get("status") != run["state"]:
        found.append(f"{where} says {state.get('status')}, Temporal says {run['state']}")
    elif run["state"] == "complete" and state.get("update") != run["update"]:
        found.append(f"{where} says {state.get('update')} updates, Temporal says {run['update']}")
    if submitted is not None and files["identity"] not in (None, submitted):
        found.append(
            f"{run['root']}/{layout.RESOLVED_CONFIG} means {files['identity']}, "
            f"submitted was {submitted}"
        )
    return found


def show_details(console: Console, run: dict[str, Any]) -> None:
    """Configuration, warnings and attempts of one run."""

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    matches = run["config_matches_submission"]
    if matches is not None:
        differs = run.get("config_differs")
        verdict = "is what was submitted" if matches else "is NOT what was submitted"
        line(f"run file {verdict}{f' (different: {differs})' if differs else ''}")
    if run["receipt"] is not None:
        is_same = "means the same" if run["config_matches_receipt"] else "means another run"
        line(f"receipt {run['receipt']} {is_same}")
    for warning in run["warnings"]:
        line(f"warning: {warning}", "yellow")
    columns = ("task", "rank", "state", "attempt", "host", "pid", "age", "last failure")
    table = Table(*columns, box=None)
    table.add_column("reason", overflow="fold")
    for each in run["attempts"]:
        age = "-" if each["age_s"] is None else duration(each["age_s"])
        reason = (each["reason"] or "").splitlines()
        cells = (
            each["task"],
            str(each["rank"]),
            each["state"],
            str(each["attempt"]),
            each["host"] or "?",
            "?" if each["pid"] is None else str(each["pid"]),
            age,
            each["last_failure"] or "-",
            reason[0] if reason else "",
        )
        table.add_row(*map(Text, cells))
    console.print(table)


def _files(root: str) -> dict[str, Any]:
    """``workflow.json`` and the recorded run file; empty where they cannot be read."""
    document = _object(root, layout.RESOLVED_CONFIG) if root else {}
    return {
        "state": _object(root, layout.WORKFLOW_JSON) if root else {},
        "document": document,
        "identity": recorded_identity(document) if document else None,
    }


def _object(root: str, name: str) -> dict[str, Any]:
    value = artifacts.read_json(root, name)
    return value if isinstance(value, dict) else {}
