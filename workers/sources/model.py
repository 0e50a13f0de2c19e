"""``prepared/hf``: the model folder of a run, made once, recognized by its identity marker.

On an object store it is made on this host, copied there, and found in the host's cache ever after.
The marker ``workflow-model.json`` holds the identity of the source and the inventory of the folder.
A folder whose marker matches is used again; one without a marker is never adopted.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from safetensors import SafetensorError, safe_open

from activities.storage import layout
from activities.storage.atomic import storage_errors
from activities.storage.host_cache import transfer_folder
from activities.storage.local_copy import FILES, has_folder, local_folder, put_folder
from activities.storage.settled import is_settled
from activities.storage.store import Store
from configs.run import RunSpec
from configs.sglang_model_checks import problems_of_cut
from models.errors import ConfigurationError
from workers.engines.native.model_shape import read_model_shape
from workers.engines.sglang.own_head import require_own_head
from workers.sources.folders import MARKER, discard, inventory, is_as_made, staged
from workers.sources.origins import BucketOrigin, FolderOrigin, Origin, origin_of

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model folder that transformers and the engines load."""

    path: Path
    num_parameters: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """Every token that ends a response."""
    model_type: str
    max_positions: int
    """Longest sequence; 0 when the configuration does not say."""
    num_bytes: int
    """Of the weights."""


def prepare_model(spec: RunSpec, store: Store) -> PreparedModel:
    """Make ``prepared/hf`` from ``model.source``, or find it made.

    Raises:
        ConfigurationError: the source is unusable, the folder belongs to another source, or the
            model has fewer positions than ``core.max_context_length``.
        StorageFull: no space for the folder.
    """
    origin = origin_of(spec)
    if isinstance(origin, FolderOrigin):
        if store.is_local and _target(store).resolve().is_relative_to(origin.path):
            raise ConfigurationError(f"output.root must not lie inside model.source {origin.path}")
        require_usable(spec, origin.path)
    identity = json.loads(json.dumps(origin.identity()))
    if _may_be_made_anew(store) and _is_of_another_source(
        local_folder(store, layout.PREPARED_MODEL), identity
    ):
        _remove(store)
    if has_folder(store, layout.PREPARED_MODEL):
        _require_same(local_folder(store, layout.PREPARED_MODEL), identity)
    else:
        if isinstance(origin, BucketOrigin):
            require_usable(spec, origin.folder().path)
        _make(store, origin, identity)
    model = describe_model(local_folder(store, layout.PREPARED_MODEL))
    _require_positions(spec.core.max_context_length, model)
    return model


def _may_be_made_anew(store: Store) -> bool:
    """Whether it was left by a start that ended before anything was sampled from it."""
    return has_folder(store, layout.PREPARED_MODEL) and not is_settled(store)


def _make(store: Store, origin: Origin, identity: dict[str, Any]) -> None:
    if store.is_local:
        _build(origin, identity, _target(store))
        return
    with transfer_folder() as scratch:
        _build(origin, identity, scratch / "hf")
        put_folder(store, scratch / "hf", layout.PREPARED_MODEL)


def _remove(store: Store) -> None:
    """Delete the folder; what a kill leaves of it does not count, and is made anew."""
    if store.is_local:
        discard(_target(store))
        return
    store.remove_tree(f"{layout.PREPARED_MODEL}/{FILES}")
    store.remove_tree(layout.PREPARED_MODEL)


def _target(store: Store) -> Path:
    return store.local_path(layout.PREPARED_MODEL)


def require_usable(spec: RunSpec, folder: Path) -> None:
    """Refuse a model folder that could be copied and then neither served nor trained.

    Reads headers and small files only, no weights.

    Raises:
        ConfigurationError: naming the file that is damaged, or what the engine cannot compute.
    """
    if spec.inference.engine == "native":
        read_model_shape(folder)
    config = _read_object(folder / "config.json")
    require_own_head(folder, config)
    refused = next(problems_of_cut(config, spec.inference.tensor_parallel_size), None)
    if refused is not None:
        raise ConfigurationError(f"{folder}/config.json: {refused}")
    _require_positions(spec.core.max_context_length, describe_model(folder))


def describe_model(path: Path) -> PreparedModel:
    """Sizes and stop tokens of a model folder, read without loading it.

    Raises:
        ConfigurationError: a file is damaged, or there is no stop token.
    """
    config = _read_object(path / "config.json")
    text = config.get("text_config", config)
    files = sorted(path.glob("*.safetensors"))
    return PreparedModel(
        path=path,
        num_parameters=sum(_num_elements(file) for file in files),
        vocab_size=int(text["vocab_size"]),
        eos_token_ids=_eos_ids(path, text),
        model_type=str(config.get("model_type", "")),
        max_positions=int(text.get("max_position_embeddings") or 0),
        num_bytes=sum(file.stat().st_size for file in files),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} must hold a JSON object")
    return value


def _is_of_another_source(target: Path, identity: dict[str, Any]) -> bool:
    """Whether ``prepare_model`` made ``target``, and from something else."""
    marker = target / MARKER
    return marker.is_file() and _read_object(marker).get("identity") != identity


def _build(origin: Origin, identity: dict[str, Any], target: Path) -> None:
    """Stage, describe (which proves that it can be read), mark, rename."""
    started = time.perf_counter()
    with storage_errors(str(target)), staged(target) as stage:
        origin.build(stage)
        describe_model(stage)
        marker = {"identity": identity, "prepared_files": inventory(stage)}
        (stage / MARKER).write_text(json.dumps(marker, indent=2, sort_keys=True) + "\n")
    _log.info("model prepared", path=str(target), seconds=round(time.perf_counter() - started, 1))


def _require_positions(context: int, model: PreparedModel) -> None:
    """Refuse a context that engines would cut: its requests would fail in the middle of the run."""
    if 0 < model.max_positions < context:
        raise ConfigurationError(
            f"core.max_context_length = {context} exceeds the {model.max_positions} positions of "
            f"the model in {model.path}; use at most {model.max_positions}"
        )


def _require_same(target: Path, identity: dict[str, Any]) -> None:
    """Refuse a folder that was not made from this source, or was changed since."""
    marker_path = target / MARKER
    if not marker_path.is_file():
        raise ConfigurationError(
            f"{target} exists without {MARKER}: it is not known what it was made from; remove it "
            "or choose another output.root"
        )
    marker = json.loads(marker_path.read_text())
    if marker["identity"] != identity:
        changed = _first_difference(marker["identity"], identity)
        raise ConfigurationError(
            f"{target} was prepared from another model ({changed}); choose another output.root or "
            "restore the model.source of this run"
        )
    if not is_as_made(target):
        raise ConfigurationError(
            f"{target} was changed after it was prepared; remove it so that it is made again"
        )


def _first_difference(old: Any, new: Any, where: str = "identity") -> str:
    """The first place where two JSON values differ, for a message."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return _first_difference(old.get(key), new.get(key), f"{where}.{key}")
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (left, right) in enumerate(zip(old, new, strict=True)):
            if left != right:
                return _first_difference(left, right, f"{where}[{place}]")
    return f"{where}: {str(old)[:80]} then, {str(new)[:80]} now"


def _num_elements(file: Path) -> int:
    total = 0
    try:
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118  safe_open has no __iter__
                count = 1
                for size in tensors.get_slice(name).get_shape():
                    count *= size
                total += count
    except SafetensorError as error:
        raise ConfigurationError(f"{file} cannot be read as safetensors: {error}") from error
    return total


def _eos_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Stop tokens of the generation configuration, else of the model configuration."""
    generation = path / "generation_config.json"
    settings = _read_object(generation) if generation.is_file() else {}
    found = settings.get("eos_token_id")
    if found is None:
        found = config.get("eos_token_id")
    if found is None:
        raise ConfigurationError(
            f"{path} names no eos_token_id in generation_config.json or config.json; responses "
            "could never end"
        )
    return tuple(found) if isinstance(found, list) else (int(found),)
