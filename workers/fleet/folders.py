"""Folders of a run on this host: scratch files of actors, exported weights."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path


def scratch_folder(root: str) -> Path:
    """Where the actors of the run at ``root`` keep ready files and caches; one a user."""
    return Path(tempfile.gettempdir()) / f"perdure-run-{os.getuid()}-{_key(root)}"


def export_folders(root: str) -> tuple[Path, Path]:
    """Where trainers of the run at ``root`` may have put weights: shared memory, temporary storage.

    The places of ``workers.trainers.weights.export_bases``, which needs torch; a test compares.
    """
    name = f"perdure-{_key(root)}"
    if named := os.environ.get("PERDURE_EXPORT_DIR"):
        return Path(named) / name, Path(named) / name
    return Path("/dev/shm") / name, Path(tempfile.gettempdir()) / name


def remove_run_folders(root: str) -> None:
    """Remove whatever is left of them: after the last process of the run has ended."""
    for folder in (scratch_folder(root), *export_folders(root)):
        shutil.rmtree(folder, ignore_errors=True)


def _key(root: str) -> str:
    return hashlib.sha256(root.encode()).hexdigest()[:16]
