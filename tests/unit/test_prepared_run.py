"""When a preparation that is there already may be used."""

import json

import pytest

from activities.storage import layout
from activities.storage.store import Store
from workers.actors.preparation import PreparedRun, find_prepared
from workers.sources.folders import MARKER, inventory

REPORT = PreparedRun(
    spec_sha256="a" * 64,
    num_parameters=3,
    vocab_size=2,
    eos_token_ids=(1,),
    train_prompts=4,
    eval_prompts=0,
)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    folder = tmp_path / layout.PREPARED_MODEL
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / MARKER).write_text(json.dumps({"prepared_files": inventory(folder)}))
    store.write_json(layout.MANIFEST_JSON, {})
    store.write_json(layout.PREPARED_REPORT, REPORT.model_dump(mode="json"))
    return store


def test_the_report_of_the_same_run_file_is_found(store):
    assert find_prepared(store, "a" * 64) == REPORT
    assert find_prepared(store, "b" * 64) is None


@pytest.mark.parametrize("lost", [layout.PREPARED_REPORT, layout.MANIFEST_JSON])
def test_without_report_or_data_it_is_made_again(store, lost):
    store.local_path(lost).unlink()
    assert find_prepared(store, "a" * 64) is None


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", MARKER])
def test_a_lost_or_torn_file_of_the_model_is_not_taken_for_a_model(store, name):
    file = store.local_path(layout.PREPARED_MODEL) / name
    file.write_bytes(b"{")
    assert find_prepared(store, "a" * 64) is None
    file.unlink()
    assert find_prepared(store, "a" * 64) is None
