"""Which values of a run file are paths, and what they are relative to.

Inputs (``model.source``, ``data.prompt_data``, ``data.eval_prompt_data``) are relative to the run
file's folder: they travel with it. ``output.root`` is relative to the current directory: recipes
live inside an installation, results do not. ``~`` expands. URLs stay as they are.
"""

import os
from pathlib import Path

from configs.model import TinySpec
from configs.problem import Problem, configuration_error
from configs.run import RunSpec

_EXPLICIT = ("./", "../", "/", "~")


def with_absolute_paths(spec: RunSpec, folder: Path | None, origin: str) -> RunSpec:
    """Resolve every path of ``spec``; also writes out ``[model.tiny]`` where it is implied.

    Args:
        spec: as validated.
        folder: the run file's folder; none refuses relative paths.
        origin: the file's name for messages.

    Raises:
        ConfigurationError: a relative path without a folder.
    """
    source = spec.model.source
    if _is_model_path(source, folder):
        source = _absolute(source, folder, "model.source", origin)
    tiny = spec.model.tiny or (TinySpec() if source == "tiny" else None)
    data = {
        key: _absolute(value, folder, f"data.{key}", origin)
        for key, value in (
            ("prompt_data", spec.data.prompt_data),
            ("eval_prompt_data", spec.data.eval_prompt_data),
        )
        if value is not None
    }
    current = Path.cwd() if folder is not None else None
    root = _absolute(spec.output.root, current, "output.root", origin)
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"source": source, "tiny": tiny}),
            "data": spec.data.model_copy(update=data),
            "output": spec.output.model_copy(update={"root": root}),
        }
    )


def is_url(text: str) -> bool:
    """Whether ``text`` names a storage scheme (``s3://bucket/key``) rather than a local path."""
    return "://" in text


def local_model_folder(source: str) -> Path | None:
    """The folder that ``model.source`` names on this machine, if it names one."""
    return Path(source) if source.startswith("/") else None


def _is_model_path(source: str, folder: Path | None) -> bool:
    if source.startswith(_EXPLICIT):
        return True
    return folder is not None and source != "tiny" and (folder / source).is_dir()


def _absolute(text: str, folder: Path | None, key: str, origin: str) -> str:
    if is_url(text):
        return text.removeprefix("file://") if text.startswith("file:///") else text
    expanded = os.path.expanduser(text)
    if os.path.isabs(expanded):
        return os.path.normpath(expanded)
    if folder is None:
        problem = Problem(key, "must be an absolute path or a URL here", text)
        raise configuration_error(origin, [problem])
    return os.path.normpath(folder / expanded)
