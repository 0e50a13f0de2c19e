"""Whose root it is, which run file it was made from, how it ended, what it was prepared from."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from activities.analysis.completion import Check, Flaw, Root, file_flaws, try_read
from activities.storage import layout
from activities.storage.lease import read_owner
from configs.compare import differences, recorded_identity
from configs.load import Loaded, document_sha256
from models.run import RunState

_ANOTHER = "name the run that the root belongs to, or the root of this run"
_RESTORE = "restore the file from a copy; without it nothing tells what ran"
_MARKER = "workflow-model.json"
_PREPARED = "restore it from a copy; what was trained can no longer be traced to its inputs"


def check_owner(root: Root, run_id: str | None) -> Check:
    """Whether files name one run, and the one that was asked for."""
    owner = try_read(partial(read_owner, root.store))
    named: dict[str, str] = {}
    flaws: list[Flaw] = []
    if root.state is not None:
        named[layout.WORKFLOW_JSON] = str(root.state.get("run_id"))
    if isinstance(owner, str) or owner is None:
        flaws.append(Flaw(root.path(layout.OWNER_JSON), owner or "missing", _RESTORE))
    else:
        named[layout.OWNER_JSON] = owner.owner.run_id
    wanted = run_id or next(iter(named.values()), None)
    for rel, found in named.items():
        if found != wanted:
            problem = f"belongs to {found}, not to {wanted}"
            flaws.append(Flaw(root.path(rel), problem, _ANOTHER))
    return Check("owner", f"{', '.join(sorted(set(named.values()))) or 'nobody'}", tuple(flaws))


def check_run_file(root: Root, loaded: Loaded | None) -> Check:
    """Whether the recorded run file is the one that ran, and means what ``loaded`` means."""
    where = root.path(layout.RESOLVED_CONFIG)
    if root.document is None or root.spec is None:
        problem = root.unreadable.get(layout.RESOLVED_CONFIG, "missing")
        return Check("run file", "no readable record", (Flaw(where, problem, _RESTORE),))
    flaws: list[Flaw] = []
    found, recorded = document_sha256(root.document), (root.state or {}).get("spec_sha256")
    if found != recorded:
        problem = f"edited after the start: SHA-256 {found}, {layout.WORKFLOW_JSON} has {recorded}"
        flaws.append(Flaw(where, problem, _RESTORE))
    evidence = f"{layout.RESOLVED_CONFIG} {found[:16]}"
    if loaded is not None:
        identity = recorded_identity(root.document)
        evidence += f", identity {identity[:16]}"
        if identity != loaded.identity:
            keys = differences(root.document, loaded)
            problem = f"means another run than {layout.RESOLVED_CONFIG} (different: {keys})"
            remedy = f"put these keys back to what {where} says, or name the run by its id"
            flaws.append(Flaw(loaded.path, problem, remedy))
        else:
            evidence += f", same as {loaded.path}"
    return Check("run file", evidence, tuple(flaws))


def check_state(root: Root) -> Check:
    """Whether ``workflow.json`` says complete."""
    where, state = root.path(layout.WORKFLOW_JSON), root.state
    if state is None:
        problem = root.unreadable.get(layout.WORKFLOW_JSON, "missing")
        return Check("state", "unknown", (Flaw(where, problem, _RESTORE),))
    status = str(state.get("status"))
    evidence = f"{status}, attempt {state.get('attempt')}, epoch {state.get('epoch')}"
    if status == RunState.COMPLETE:
        return Check("state", evidence)
    problem = f"is {status}"
    if state.get("error"):
        problem += f": {str(state['error']).splitlines()[0]}"
    remedy = "the same `perdure run` goes on from the newest checkpoint"
    if status in (RunState.PREPARING, RunState.TRAINING):
        problem += ", or was when everything was killed"
        remedy = "wait for it (`perdure wait`); if nothing runs, `perdure run` resumes it"
    return Check("state", evidence, (Flaw(where, problem, remedy),))


def check_prepared(root: Root) -> Check:
    """Whether the prepared data has its recorded digests and the model's folder its files."""
    flaws: list[Flaw] = []
    outputs = _field(root, layout.MANIFEST_JSON, "outputs", flaws)
    for name, sha256 in outputs.items() if isinstance(outputs, dict) else ():
        rel = f"{layout.PREPARED_DATA}/{name}"
        flaws += file_flaws(root, rel, None, str(sha256), _PREPARED)
    files = _field(root, f"{layout.PREPARED_MODEL}/{_MARKER}", "prepared_files", flaws)
    listed = list(_sizes(files))
    for name, size in listed:
        flaws += file_flaws(root, f"{layout.PREPARED_MODEL}/{name}", size, None, _PREPARED)
    if not root.store.exists(layout.PREPARED_REPORT):
        flaws.append(Flaw(root.path(layout.PREPARED_REPORT), "missing", _PREPARED))
    count = len(outputs) if isinstance(outputs, dict) else 0
    evidence = f"{count} data files by digest, {len(listed)} model files by size"
    return Check("prepared", evidence, tuple(flaws))


def _field(root: Root, rel: str, name: str, flaws: list[Flaw]) -> Any:
    """A field of a JSON marker; a flaw when the marker or the field cannot be read."""
    value = try_read(lambda: {"it": root.store.read_json(rel)[name]})
    if isinstance(value, str):
        flaws.append(Flaw(root.path(rel), value, _PREPARED))
        return None
    return value["it"]


def _sizes(files: Any) -> Iterator[tuple[str, int]]:
    for row in files if isinstance(files, list) else ():
        if isinstance(row, dict) and isinstance(row.get("size"), int):
            yield str(row.get("path")), row["size"]
