"""Folders of a run on this host: scratch files of actors, exported weights in shared memory."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


def scratch_folder(root: str) -> Path:
    """Where the actors of the run at ``root`` keep ready files and caches; one a user."""
    return Path(tempfile.gettempdir()) / f"perdure-run-{os.getuid()}-{_key(root)}"


def exports_folder(root: str) -> Path:
    """Where trainers of the run at ``root`` put exported weights.

    The same place as ``workers.trainers.weights.exports_base``, which needs torch; a test compares.
    """
    shared = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
    base = _SHARED_MEMORY if shared else Path(tempfile.gettempdir())
    return base / f"perdure-{_key(root)}"


def remove_run_folders(root: str) -> None:
    """Remove both, whatever is left of them: after the last process of the run has ended."""
    shutil.rmtree(scratch_folder(root), ignore_errors=True)
    shutil.rmtree(exports_folder(root), ignore_errors=True)


def _key(root: str) -> str:
    return hashlib.sha256(root.encode()).hexdigest()[:16]
