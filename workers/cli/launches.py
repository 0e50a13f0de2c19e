"""Launch receipts: what was submitted, kept by whoever submitted it.

One JSON file a run under ``PERDURE_LAUNCH_RECEIPTS``, written when the server has accepted the
start. It outlives the output root and the server's history, so ``status`` can tell whether what
runs is what was launched. A later start of the same run moves the receipt before it aside.
"""

import hashlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from activities.storage import atomic
from configs.load import Loaded
from configs.plan import build_plan
from models.errors import ConfigurationError
from workers.cli.place import Place
from workers.deployment import BUILD_ID
from workers.local_stack import state_dir
from workers.report.redaction import redactor_of
from workers.source_digest import package_folders, source_digest

NAMES = ("PERDURE_LAUNCH_RECEIPTS", "MILES_LAUNCH_RECEIPTS")
"""Either variable names the folder; both with different values are refused."""

_KEY_DIGITS = 16
_GIT_TIMEOUT_S = 5.0


def receipts_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where receipts are kept: as a variable says, else ``launches`` in the state folder.

    Raises:
        ConfigurationError: both variables are set and differ.
    """
    variables = os.environ if environment is None else environment
    given = {name: variables[name] for name in NAMES if variables.get(name)}
    if len(set(given.values())) > 1:
        raise ConfigurationError(f"{given}: set one of these, or both to the same value")
    if given:
        return Path(next(iter(given.values()))).expanduser().absolute()
    return state_dir() / "launches"


def receipt_path(name: str, root: str) -> Path:
    """The newest receipt of the run ``name`` with output root ``root``, there or not."""
    place = root if "://" in root else str(Path(root).absolute())
    identity = json.dumps({"name": name, "root": place}, sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:_KEY_DIGITS]
    return receipts_folder() / f"{name.replace('/', '_')}-{key}.json"


def require_folder() -> None:
    """Make the folder of receipts, before anything is launched that could not be recorded.

    Raises:
        ConfigurationError: receipts cannot be written there.
    """
    folder = receipts_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(_unwritable(folder, error)) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(_unwritable(folder, PermissionError("no permission")))


def write_receipt(
    loaded: Loaded, place: Place, namespace: str, experiment_id: str, **derived: Any
) -> Path:
    """Record a start durably and return where; an older receipt of the run is kept beside it.

    Args:
        loaded: what was submitted.
        place: the server that accepted it.
        namespace: its Temporal namespace.
        experiment_id: Temporal's run id of the execution that was started.
        derived: what the start was told beside the run file, for example a rewind.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    path = receipt_path(loaded.spec.name, loaded.spec.output.root)
    receipt = _receipt(loaded, place, namespace, experiment_id) | derived
    try:
        require_folder()
        before = read_receipt(path)
        if before is not None and before.get("experiment_id") != experiment_id:
            path.rename(path.with_name(f"{path.stem}-{before.get('experiment_id')}.json"))
        atomic.write_file(path, json.dumps(receipt, indent=2, sort_keys=True).encode() + b"\n")
    except OSError as error:
        raise ConfigurationError(_unwritable(path, error)) from error
    return path


def read_receipt(path: Path) -> dict[str, Any] | None:
    """The receipt in ``path``; none when it is missing or no JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _receipt(loaded: Loaded, place: Place, namespace: str, experiment_id: str) -> dict[str, Any]:
    spec = loaded.spec
    plan = build_plan(loaded)
    return {
        "schema_version": 1,
        "experiment_id": experiment_id,
        "run_id": spec.run_id,
        "root": spec.output.root,
        "launched_unix": time.time(),
        "submitter": {"host": socket.gethostname(), "pid": os.getpid()},
        "temporal": {"address": place.address, "namespace": namespace, "ui": place.ui},
        "image": os.environ.get(BUILD_ID) or None,
        "source_digest": source_digest(),
        "revision": _revision(),
        "config_path": str(Path(loaded.path).absolute()),
        "spec_sha256": loaded.sha256,
        "identity_sha256": loaded.identity,
        "spec": redactor_of(loaded.document).document(loaded.document),
        "allocation": plan["allocation"],
        "placements": _placements(loaded),
    }


def _placements(loaded: Loaded) -> list[dict[str, Any]]:
    """What Ray is asked for; on which hosts it lies is in ``fleet.json`` once it is placed."""
    # Brings the whole fleet with it, which only a start needs.
    from workers.fleet.placement import engine_bundles, trainer_bundle

    trainer, engines = trainer_bundle(loaded.spec), engine_bundles(loaded.spec)
    rows: list[dict[str, Any]] = [{"task": "trainer", "bundles": [dict(trainer)]}]
    if engines:
        rows.append({"task": "engine", "bundles": [dict(bundle) for bundle in engines]})
    return [
        row
        | {
            "replicas": len(row["bundles"]),
            "gpus": int(sum(bundle.get("GPU", 0) for bundle in row["bundles"])),
        }
        for row in rows
    ]


def _revision() -> dict[str, Any] | None:
    """Commit of the checkout that this code runs from, and whether it was changed; or none."""
    folder = package_folders()["workers"].parent
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return {"commit": head, "dirty": bool(_git(folder, "status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=_GIT_TIMEOUT_S,
    )
    return done.stdout.strip()


def _unwritable(path: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{path}: launch receipts cannot be written ({reason}); set {NAMES[0]} to another folder"
