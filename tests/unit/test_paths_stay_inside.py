"""Names from outside lead to no other folder: run files, markers, indexes, stores, receipts."""

import json
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from activities.background.receipts import receipts
from activities.storage.commit import newest_checkpoint
from activities.storage.store import Store
from configs.load import resolve_document
from models.checkpoint import CheckpointFile
from models.errors import ConfigurationError, ContractViolation
from models.inside import require_inside
from tests.support.completed_run import CompletedRun
from workers.engines.native.model_files import safetensor_files
from workers.sources.origins import origin_of

ELSEWHERE = ("../x", "/etc/passwd", "a/../../x", "..", "")


@pytest.mark.parametrize("name", [*ELSEWHERE, "a\\..\\x", "a\0b"])
def test_what_leads_elsewhere_is_no_inner_path(name: str) -> None:
    with pytest.raises(ValueError, match="inside"):
        require_inside(name)
    with pytest.raises(ValidationError):
        CheckpointFile(path=name, sha256="", num_bytes=0)
    assert require_inside("a/b-1.safetensors") == "a/b-1.safetensors"


@pytest.mark.parametrize("name", ["../x", "a/b", "/x", "..", ".hidden", "a\n", "a b", ""])
def test_a_run_is_not_called_like_a_path(name: str, tmp_path: Path) -> None:
    document = {
        "schema_version": 1,
        "name": name,
        "model": {"source": "tiny", "tiny": {}},
        "data": {"tasks": [{"task": "reverse_word", "train_count": 64}]},
        "output": {"root": str(tmp_path)},
        "training": {"num_rollouts": 1, "rollout_batch_size": 2, "samples_per_prompt": 2},
    }
    with pytest.raises(ConfigurationError, match="name"):
        resolve_document(document, origin="run.toml")


@pytest.mark.parametrize("rel", ["../x", "/etc/passwd", "a/../../x"])
def test_a_store_does_nothing_outside_of_its_root(tmp_path: Path, rel: str) -> None:
    store = Store(tmp_path / "root")
    (tmp_path / "x").write_text("kept")
    for act in (
        store.read_bytes,
        store.exists,
        store.list,
        store.size,
        store.sha256,
        store.remove_tree,
        store.local_path,
        lambda path: store.write_bytes(path, b""),
        lambda path: store.append_jsonl(path, {}),
        lambda path: store.rename(path, "y"),
        lambda path: store.rename("y", path),
    ):
        with pytest.raises(ValueError, match="inside the output root"):
            act(rel)
    assert (tmp_path / "x").read_text() == "kept"


def test_a_marker_that_names_files_elsewhere_is_none(tmp_path: Path) -> None:
    made = CompletedRun(str(tmp_path / "root"))
    before = newest_checkpoint(made.store)
    assert before is not None
    marker = made.store.read_json(f"{before.folder}/complete.json")
    marker["files"][0]["path"] = "../../../outside"
    made.store.write_json(f"{before.folder}/complete.json", marker)

    after = newest_checkpoint(made.store)
    assert after is None or after.folder != before.folder


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", 7])
def test_an_index_names_shards_of_its_own_folder(tmp_path: Path, name: object) -> None:
    index = {"weight_map": {"model.embed_tokens.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match="is not a safetensors index"):
        safetensor_files(tmp_path)


def test_only_receipts_are_read_as_receipts(tmp_path: Path) -> None:
    made = CompletedRun(str(tmp_path / "root"))
    folder = Path(made.store.root) / "evaluation"
    folder.mkdir(exist_ok=True)
    for name in (
        "update-1.json",
        "update-00000001-zz.json",
        "x.json",
        "update-00000001-0.json.bak",
    ):
        (folder / name).write_text("{}")
    assert not [rel for rel, _ in receipts(made.store) if "zz" in rel or "x.json" in rel]


@pytest.mark.parametrize("source", ["wheel:../x", "wheel:/etc", "wheel:a/b"])
def test_a_model_package_is_not_called_like_a_path(tmp_path: Path, source: str) -> None:
    document = {
        "schema_version": 1,
        "name": "x",
        "model": {"source": source},
        "data": {"tasks": [{"task": "reverse_word", "train_count": 64}]},
        "output": {"root": str(tmp_path)},
        "training": {"num_rollouts": 1, "rollout_batch_size": 2, "samples_per_prompt": 2},
    }
    with pytest.raises((ConfigurationError, ContractViolation)):
        origin_of(resolve_document(document, origin="run.toml").spec)
    shutil.rmtree(tmp_path, ignore_errors=True)
