"""What a run reads on this machine, looked into before anything expensive starts.

The same code as in ``prepare``, without what takes long: no weights, no tokenizer, one question of
each generator. A hub model is not fetched.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from configs.inputs import find_missing_inputs
from configs.paths import is_url
from configs.problem import Problem
from configs.run import RunSpec
from models.errors import ConfigurationError
from workers.engines.sglang.installed import argument_problems, find_sglang, require_sglang
from workers.ray_address import VARIABLE as RAY_ADDRESS


def find_input_problems(spec: RunSpec) -> list[Problem]:
    """Everything about the run's model, data, root and engines that would end it as it prepares."""
    return [
        *_refusals(partial(_check_model, spec)),
        *find_missing_inputs(spec),
        *_refusals(partial(_check_root, spec.output.root)),
        *_data(spec),
        *_server_arguments(spec),
    ]


def find_engine_problems(spec: RunSpec) -> list[Problem]:
    """That this machine has no SGLang, and engines of the run would start here.

    They may start elsewhere when a Ray cluster is named; then there is nothing to say.
    """
    if spec.inference.engine != "sglang" or os.environ.get(RAY_ADDRESS):
        return []
    return list(_refusals(require_sglang))


def _check_root(root: str) -> None:
    """Refuse a URL that no installed package opens; any local path can be opened."""
    if is_url(root):
        from activities.storage.store import Store  # fsspec is slow to import

        Store(root)


def _check_model(spec: RunSpec) -> None:
    source = spec.model.source
    if source == "tiny":
        return
    # safetensors and importlib are not needed for a tiny model.
    from workers.sources.model import require_usable
    from workers.sources.origins import FolderOrigin, local_origin

    origin = local_origin(spec)
    if isinstance(origin, FolderOrigin):
        require_usable(spec, origin.path)


def _server_arguments(spec: RunSpec) -> list[Problem]:
    """Arguments that the SGLang of this machine does not have; a machine without one says nothing.

    Engines may run elsewhere; there they are checked again.
    """
    if spec.inference.engine != "sglang" or not spec.inference.sglang:
        return []
    package = find_sglang()
    return argument_problems(spec.inference.sglang, package) if package is not None else []


def _data(spec: RunSpec) -> Iterator[Problem]:
    from workers.sources.tasks import first_question

    for task in spec.data.tasks:
        yield from _refusals(partial(first_question, task, spec.data.seed))
    for path in (spec.data.prompt_data, spec.data.eval_prompt_data):
        if path is not None and not is_url(path) and _has_content(Path(path)):
            content = Path(path).read_bytes()
            yield from _refusals(partial(_check_rows, spec, path, content))


def _check_rows(spec: RunSpec, path: str, content: bytes) -> None:
    from workers.sources.rows import jsonl_rows

    rows = jsonl_rows(path, content, spec.data.verifier)
    if any(row.verifier in ("code", "code_stdio") for row in rows):
        from activities.verifiers.code import service_address  # httpx is slow to import

        service_address({**os.environ, **spec.launch.env})


def _has_content(path: Path) -> bool:
    """False for what ``find_missing_inputs`` has reported."""
    return path.is_file() and path.stat().st_size > 0


def _refusals(check: Callable[[], object]) -> Iterator[Problem]:
    """The refusal of ``check``, if any. It names file or key itself."""
    try:
        check()
    except ConfigurationError as error:
        yield Problem("", error.message)
