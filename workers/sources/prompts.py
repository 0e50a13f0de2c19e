"""``prepared/data``: prompts rendered, tokenized and checked once, then immutable.

Prepared into a hidden sibling and renamed, so a kill leaves no folder that a later start would
adopt. On an object store, which cannot rename, the manifest is written last and a folder without
one is prepared again.
"""

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from activities.storage import layout
from activities.storage.settled import is_settled
from activities.storage.store import Store
from configs.run import RunSpec
from models.errors import ConfigurationError, DigestMismatch
from models.prompt import PreparedPrompt
from workers.sources.gym import gym_version
from workers.sources.manifest import DataManifest, read_manifest, require_unchanged
from workers.sources.rows import SourceRow, jsonl_rows, task_rows
from workers.sources.tasks import GYM_PREFIX

Split = Literal["train", "eval"]

_FILES: dict[Split, str] = {"train": layout.TRAIN_JSONL, "eval": layout.EVAL_JSONL}
_STAGING = ".data.preparing-"


@dataclass(frozen=True, slots=True)
class PreparedData:
    """What ``prepared/data`` holds."""

    train_prompts: int
    eval_prompts: int
    train_sha256: str
    """Digest of ``train.jsonl``: the data set that a cursor walks."""
    reused: bool
    """It was there already, made from the same configuration and inputs."""


def prepare_data(spec: RunSpec, store: Store, model_dir: Path) -> PreparedData:
    """Make ``prepared/data`` of ``spec`` with the tokenizer in ``model_dir``, or reuse it.

    Blocks for as long as generating and tokenizing takes. Raises ``ConfigurationError`` for
    missing, malformed, empty or overlapping data (file and line, or split and row), for prompts
    that leave no room for a response, and for prepared data made from something else.
    """
    from workers.sources.rendering import tokenizer_digests  # loads transformers, which is slow

    contract = {
        "data": spec.data.model_dump(mode="json", exclude={"prompt_data", "eval_prompt_data"}),
        "tokenizer_files": tokenizer_digests(model_dir),
        "core.max_context_length": spec.core.max_context_length,
        "inference.max_response_length": spec.inference.max_response_length,
        "evaluation.max_response_length": spec.evaluation.max_response_length,
    }
    inputs = _read_inputs(spec)
    digests = {key: hashlib.sha256(content).hexdigest() for key, content in inputs.items()}
    if _is_there(store):
        try:
            return _reuse(store, contract, digests)
        except ConfigurationError:
            if is_settled(store) or not store.exists(layout.MANIFEST_JSON):
                raise
            # Left by a start that ended before anything was sampled from it.
            store.remove_tree(layout.PREPARED_DATA)
    splits = _prepare_splits(spec, inputs, model_dir)
    outputs = _encode(splits)
    manifest = DataManifest(
        contract=contract,
        inputs=digests,
        outputs={name: hashlib.sha256(data).hexdigest() for name, data in outputs.items()},
        rows={split: len(rows) for split, rows in splits.items()},
        provenance=_provenance(spec, splits),
    )
    _require_unchanged_inputs(spec, digests)
    if not _commit(store, outputs, manifest):
        return _reuse(store, contract, digests)
    return _result(manifest, reused=False)


def load_prompts(store: Store, split: Split) -> list[PreparedPrompt]:
    """Rows of a split in file order; the held-out split may be empty.

    Raises ``DigestMismatch`` when the file is not the one that the manifest records.
    """
    path = _FILES[split]
    data = store.read_bytes(path)
    recorded = read_manifest(store).outputs[path.rsplit("/", 1)[-1]]
    found = hashlib.sha256(data).hexdigest()
    if recorded != found:
        raise DigestMismatch(
            f"{store.root}/{path}: recorded SHA-256 {recorded}, found {found}; restore it"
        )
    return [PreparedPrompt.model_validate_json(line) for line in data.split(b"\n") if line]


def train_sha256(store: Store) -> str:
    """Recorded digest of the prepared training file."""
    return read_manifest(store).outputs["train.jsonl"]


def _is_there(store: Store) -> bool:
    return store.exists(layout.PREPARED_DATA if store.is_local else layout.MANIFEST_JSON)


def _reuse(store: Store, contract: dict[str, Any], digests: dict[str, str]) -> PreparedData:
    manifest = read_manifest(store)
    require_unchanged(store, manifest, contract, digests)
    return _result(manifest, reused=True)


def _result(manifest: DataManifest, *, reused: bool) -> PreparedData:
    return PreparedData(
        train_prompts=manifest.rows["train"],
        eval_prompts=manifest.rows["eval"],
        train_sha256=manifest.outputs["train.jsonl"],
        reused=reused,
    )


def _input_paths(spec: RunSpec) -> dict[str, str]:
    named = {
        "data.prompt_data": spec.data.prompt_data,
        "data.eval_prompt_data": spec.data.eval_prompt_data,
    }
    return {key: path for key, path in named.items() if path is not None}


def _read_inputs(spec: RunSpec) -> dict[str, bytes]:
    """Run-file key -> content of the file or URL that it names."""
    contents: dict[str, bytes] = {}
    for key, path in _input_paths(spec).items():
        folder, _, name = path.rpartition("/")
        try:
            contents[key] = Store(folder or ("/" if path.startswith("/") else ".")).read_bytes(name)
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            raise ConfigurationError(f"{key}: cannot read {path}: {error}") from error
    return contents


def _require_unchanged_inputs(spec: RunSpec, digests: dict[str, str]) -> None:
    for key, content in _read_inputs(spec).items():
        now = hashlib.sha256(content).hexdigest()
        if now != digests[key]:
            raise ConfigurationError(
                f"{key} changed while it was being prepared: SHA-256 was {digests[key]}, is {now}; "
                "nothing was written, start again"
            )


def _prepare_splits(
    spec: RunSpec, inputs: dict[str, bytes], model_dir: Path
) -> dict[Split, list[PreparedPrompt]]:
    from workers.sources.rendering import PromptRenderer

    train, held_out = _source_rows(spec, inputs)
    renderer = PromptRenderer(model_dir)
    eval_length = spec.evaluation.max_response_length or spec.inference.max_response_length
    context = spec.core.max_context_length
    splits: dict[Split, list[PreparedPrompt]] = {
        "train": renderer.prepare("train", train, context, spec.inference.max_response_length),
        "eval": renderer.prepare("eval", held_out, context, eval_length),
    }
    _require_disjoint(splits["train"], splits["eval"])
    return splits


def _source_rows(
    spec: RunSpec, inputs: dict[str, bytes]
) -> tuple[list[SourceRow], list[SourceRow]]:
    if not inputs:
        return task_rows(spec.data)
    paths = _input_paths(spec)
    rows = {
        key: jsonl_rows(paths[key], content, spec.data.verifier) for key, content in inputs.items()
    }
    return rows.get("data.prompt_data", []), rows.get("data.eval_prompt_data", [])


def _require_disjoint(train: Sequence[PreparedPrompt], held_out: Sequence[PreparedPrompt]) -> None:
    """Refuse a held-out prompt that is also trained on: its score would mean nothing."""
    rows = {prompt.input: number for number, prompt in enumerate(train, start=1)}
    for number, prompt in enumerate(held_out, start=1):
        if prompt.input in rows:
            raise ConfigurationError(
                f"eval row {number} repeats train row {rows[prompt.input]} "
                f"({prompt.metadata.query[:80]!r}); held-out prompts must not be trained on"
            )


def _encode(splits: dict[Split, list[PreparedPrompt]]) -> dict[str, bytes]:
    """Name of each file of the folder -> its bytes, the manifest excluded."""
    files = {
        _FILES[split].rsplit("/", 1)[-1]: "".join(map(_line, rows)).encode()
        for split, rows in splits.items()
    }
    usage: dict[str, Counter[str]] = {}
    for split, rows in splits.items():
        for prompt in rows:
            for target in prompt.metadata.verifiers:
                usage.setdefault(target.name, Counter())[f"{split}_rows"] += 1
    registry = layout.VERIFIERS_JSON.rsplit("/", 1)[-1]
    files[registry] = json.dumps(usage, sort_keys=True, indent=2).encode() + b"\n"
    return files


def _line(prompt: PreparedPrompt) -> str:
    row = prompt.model_dump(mode="json")
    return json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def _provenance(spec: RunSpec, splits: dict[Split, list[PreparedPrompt]]) -> dict[str, Any]:
    provenance: dict[str, Any] = {
        "files": _input_paths(spec),
        "sources": {
            split: dict(Counter(prompt.metadata.source_dataset for prompt in rows))
            for split, rows in splits.items()
        },
    }
    if any(task.task.startswith(GYM_PREFIX) for task in spec.data.tasks):
        provenance["reasoning_gym"] = gym_version()
    return provenance


def _commit(store: Store, outputs: dict[str, bytes], manifest: DataManifest) -> bool:
    """Write the folder, manifest last; False when another start committed one meanwhile."""
    parent = layout.PREPARED_DATA.rpartition("/")[0]
    staging = f"{parent}/{_STAGING}{secrets.token_hex(6)}"
    folder = staging if store.is_local else layout.PREPARED_DATA
    try:
        for file, data in outputs.items():
            store.write_bytes(f"{folder}/{file}", data)
        manifest_name = layout.MANIFEST_JSON.rsplit("/", 1)[-1]
        store.write_json(f"{folder}/{manifest_name}", manifest.model_dump(mode="json"))
        if store.is_local:
            store.rename(staging, layout.PREPARED_DATA)
    except OSError:
        if not store.exists(layout.MANIFEST_JSON):
            raise
        return False
    finally:
        # Of this start and of killed ones: a staged folder is never adopted.
        for entry in store.list(parent, hidden=True):
            if entry.startswith(_STAGING):
                store.remove_tree(f"{parent}/{entry}")
    return True
