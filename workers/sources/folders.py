"""Model folders: what belongs to one, and how one appears whole or not at all."""

import json
import os
import platform
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from activities.storage.atomic import sync_file, sync_folder

MARKER = "workflow-model.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")
_WEIGHT_INDEX = ".safetensors.index.json"


def is_weight_file(path: Path) -> bool:
    """Whether a file holds weights or an index of them."""
    return path.name.endswith((*_WEIGHT_SUFFIXES, _WEIGHT_INDEX))


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A hidden sibling to fill; flushed and renamed to ``folder``, or removed on an error.

    What killed processes of this host left beside ``folder`` is removed first.

    Raises:
        FileExistsError: ``folder`` is there already.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder.parent, _prefix(folder))
    stage = _sibling(folder)
    stage.mkdir()
    try:
        yield stage
        for path in stage.rglob("*"):
            if path.is_file() and not path.is_symlink():
                sync_file(path)
        os.rename(stage, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def discard(folder: Path) -> None:
    """Delete ``folder``, at once to whoever looks; ``staged`` deletes what a kill leaves of it."""
    aside = _sibling(folder)
    folder.rename(aside)
    shutil.rmtree(aside)


def inventory(folder: Path) -> list[dict[str, Any]]:
    """Path and size of every file but the marker; links count by what they point to."""
    return [
        {"path": str(path.relative_to(folder)), "size": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARKER
    ]


def is_as_made(folder: Path) -> bool:
    """Whether a marked folder still holds the files that its marker lists, with their sizes."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("prepared_files") == inventory(folder)


def copy_companions(source: Path, target: Path) -> None:
    """Copy what makes weights usable (configuration, tokenizer, template) from top level."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != MARKER and not is_weight_file(path):
            shutil.copyfile(path, target / path.name)


def _prefix(folder: Path) -> str:
    return f".{folder.name}.preparing-{platform.node()}-"


def _sibling(folder: Path) -> Path:
    """A name beside ``folder`` that tells whose it is."""
    return folder.parent / f"{_prefix(folder)}{os.getpid()}-{secrets.token_hex(4)}"


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """Delete staging folders whose process is gone."""
    for path in parent.iterdir():
        pid = path.name.removeprefix(prefix).partition("-")[0]
        if path.name.startswith(prefix) and pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
