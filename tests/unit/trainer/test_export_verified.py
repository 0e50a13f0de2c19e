"""An export is loaded again long after its run, and compared with what engines confirmed."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from activities.storage import layout
from activities.storage.store import Store
from workers.cli.status_verify import check_reload
from workers.sources.characters import character_tokenizer


@pytest.fixture
def exported(make_model: Any, tmp_path: Path) -> Path:
    """A root with an export of random weights and the row of their publication."""
    folder = tmp_path / "export-hf"
    make_model("llama").save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    store = Store(tmp_path)
    store.write_json(layout.RESOLVED_CONFIG, {"inference": {"dtype": "float32"}})
    row = {"version": 8, "transport": "disk", "digest": digest_of(folder / "model.safetensors")}
    store.append_jsonl(layout.PUBLICATION, row)
    return folder


def digest_of(path: Path) -> str:
    """As ``docs/engine-contract.md`` defines it: sorted lines of name and XXH3 of the bytes."""
    lines = [
        f"{name} {xxhash.xxh3_64_hexdigest(tensor.numpy().tobytes())}\n"
        for name, tensor in sorted(load_file(path).items())
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def problem(folder: Path) -> str:
    (flaw,) = check_reload(str(folder.parent), folder.name).flaws
    assert flaw.path == str(folder)
    return flaw.problem


def test_export_of_the_published_weights_holds(exported: Path) -> None:
    check = check_reload(str(exported.parent), exported.name)
    assert check.holds
    assert check.evidence.endswith("the weights that were published as version 8")


def test_flipped_byte(exported: Path) -> None:
    path = exported / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))
    assert "published were" in problem(exported)


def test_missing_tensor_is_not_made_up(exported: Path) -> None:
    path = exported / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata)
    assert problem(exported) == "tensors differ: model.norm.weight"


def test_missing_tokenizer(exported: Path) -> None:
    for path in exported.glob("token*"):
        path.unlink()
    assert problem(exported).startswith("does not load")


def test_weights_that_went_by_memory_are_not_compared(exported: Path) -> None:
    row = {"version": 9, "transport": "ipc", "digest": "of another kind"}
    Store(exported.parent).append_jsonl(layout.PUBLICATION, row)
    check = check_reload(str(exported.parent), exported.name)
    assert check.holds
    assert check.evidence.endswith("finite logits")
