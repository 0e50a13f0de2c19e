"""What ``doctor gpu`` is asked about: a run file, or a model folder with a run made up for it."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from activities.storage import layout
from activities.storage.local_copy import has_folder, local_folder
from activities.storage.store import Store
from configs.load import load_run, resolve_document
from models.errors import ConfigurationError
from workers.engines.sglang.installed import find_sglang
from workers.preflight.gpu import Subject

CONTEXT_LENGTH = 512
"""Of the run that is made up for a folder."""


@contextmanager
def subject_of(target: Path, overrides: Iterable[str], *, has_gpu: bool) -> Iterator[Subject]:
    """The run of a run file with its model prepared, or of a model folder.

    A model that the run has prepared already is taken from there; else it is prepared in a
    temporary folder that goes away at the end.

    Raises:
        ConfigurationError: the run file or its model is unusable.
    """
    with tempfile.TemporaryDirectory(prefix="perdure-doctor-") as scratch:
        if target.is_dir():
            document = _made_up(target, scratch, has_gpu=has_gpu)
            loaded = resolve_document(document, origin=str(target))
            yield Subject(loaded.spec, target.absolute())
            return
        spec = load_run(target, overrides).spec
        store = Store(spec.output.root)
        if has_folder(store, layout.PREPARED_MODEL):
            yield Subject(spec, local_folder(store, layout.PREPARED_MODEL))
            return
        from workers.sources.model import prepare_model

        yield Subject(spec, prepare_model(spec, Store(scratch)).path)


def _made_up(folder: Path, scratch: str, *, has_gpu: bool) -> dict[str, Any]:
    """A run of the model: on a GPU with SGLang, else on the CPU with the native engine."""
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"{folder} is no run file, and no model folder: no config.json")
    on_gpu = has_gpu and find_sglang() is not None
    return {
        "schema_version": 1,
        "name": "doctor",
        "model": {"source": str(folder.absolute())},
        "output": {"root": scratch},
        "data": {"tasks": [{"task": "reverse_word", "train_count": 8}]},
        "placement": {"mode": "colocated" if on_gpu else "cpu"},
        "inference": {
            "engine": "sglang" if on_gpu else "native",
            "dtype": "bfloat16",
        },
        "trainer": {"compute_dtype": "bfloat16" if on_gpu else "float32"},
        "core": {"max_context_length": CONTEXT_LENGTH},
    }
