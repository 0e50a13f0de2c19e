"""What a run reads and writes on this machine, looked at before anything expensive starts.

Contents are checked where they are used; here only what is missing altogether is found.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from configs.paths import is_url, local_model_folder
from configs.problem import Problem
from configs.run import RunSpec

_WEIGHTS = ("*.safetensors", "*.gguf", "pytorch_model*.bin")


def find_missing_inputs(spec: RunSpec) -> list[Problem]:
    """Files that are absent or empty, folders without weights, a root that cannot be written."""
    return [*_model(spec), *_prompts(spec), *_root(spec)]


def _model(spec: RunSpec) -> Iterator[Problem]:
    source = spec.model.source
    folder = local_model_folder(source)
    if folder is None:
        return
    if not folder.is_dir():
        yield Problem("model.source", "no such folder", source)
    elif not (folder / "config.json").is_file():
        yield Problem("model.source", "the folder has no config.json", source)
    elif not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        yield Problem("model.source", "the folder has no weights (*.safetensors)", source)


def _prompts(spec: RunSpec) -> Iterator[Problem]:
    for key, name in (
        ("prompt_data", spec.data.prompt_data),
        ("eval_prompt_data", spec.data.eval_prompt_data),
    ):
        if name is None or is_url(name):
            continue
        path = Path(name)
        if not path.is_file():
            yield Problem(f"data.{key}", "no such file", name)
        elif path.stat().st_size == 0:
            yield Problem(f"data.{key}", "the file is empty", name)


def _root(spec: RunSpec) -> Iterator[Problem]:
    root = spec.output.root
    if is_url(root):
        return
    existing = next(path for path in (Path(root), *Path(root).parents) if path.exists())
    if not existing.is_dir():
        yield Problem("output.root", f"{existing} is a file, not a folder", root)
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem("output.root", f"{existing} is not writable", root)
