"""Model folders: what belongs to one, and how one appears whole or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARKER = "workflow-model.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")
_WEIGHT_INDEX = ".safetensors.index.json"


def is_weight_file(path: Path) -> bool:
    """Whether a file holds weights or an index of them."""
    return path.name.endswith((*_WEIGHT_SUFFIXES, _WEIGHT_INDEX))


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A hidden sibling to fill; renamed to ``folder`` on success, removed on an error.

    Raises:
        FileExistsError: ``folder`` is there already.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = folder.parent / f".{folder.name}.preparing-{secrets.token_hex(6)}"
    stage.mkdir()
    try:
        yield stage
        os.rename(stage, folder)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def copy_companions(source: Path, target: Path) -> None:
    """Copy what makes weights usable (configuration, tokenizer, template) from top level."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != MARKER and not is_weight_file(path):
            shutil.copyfile(path, target / path.name)
