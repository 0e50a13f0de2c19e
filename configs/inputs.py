"""Files that a run file names on this machine, looked at before anything expensive starts.

Only what is missing altogether is found here; ``workers.sources.inputs`` looks into them.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from configs.paths import is_url
from configs.problem import Problem
from configs.run import RunSpec

_OBJECT_STORES = ("s3", "gs")


def find_missing_inputs(spec: RunSpec) -> list[Problem]:
    """Data files that are absent or empty, a root that cannot be written."""
    return [*_prompts(spec), *_root(spec)]


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
        if root.partition("://")[0] not in _OBJECT_STORES:
            yield Problem(
                "output.root",
                "a run needs a store that creates an object only where none is",
                root,
                f"use a local folder, or one of {', '.join(f'{x}://' for x in _OBJECT_STORES)}",
            )
        return
    existing = next(path for path in (Path(root), *Path(root).parents) if path.exists())
    if not existing.is_dir():
        yield Problem("output.root", f"{existing} is a file, not a folder", root)
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem("output.root", f"{existing} is not writable", root)
