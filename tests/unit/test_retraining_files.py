"""Files of a retraining: data that are new, records that are ordered, a pointer that never lies."""

import hashlib
import multiprocessing
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from activities.retraining.data import choose
from activities.retraining.lineage import (
    append_record,
    digest_folder,
    newest_promotion,
    point_to_newest,
    read_lineage,
    read_pointer,
)
from activities.retraining.plan import firing_name
from activities.storage import layout
from activities.storage.patterns import find_files
from activities.storage.store import Store
from models.errors import ConfigurationError, ContractViolation
from models.retraining import DataFile, Decision
from tests.support.promotions import promote_for_ever, record
from workers.sources.rows import jsonl_rows

ROW = b'{"prompt": "p", "answer": "a"}\n'


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder of an object store in memory."""
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(url):
        filesystem.rm(url, recursive=True)


def test_new_files_of_a_url_are_chosen_once(memory: str) -> None:
    store = Store(memory)
    store.write_bytes("day-2.jsonl", ROW + ROW)
    store.write_bytes("day-1.jsonl", b"\xef\xbb\xbf" + ROW.rstrip())
    store.write_bytes(".day-3.jsonl.tmp", ROW)
    store.write_bytes("note.txt", b"no data")
    chosen = choose([f"{memory}/*.jsonl"], [], "exact", jsonl_rows)
    assert [Path(file.url).name for file in chosen.files] == ["day-1.jsonl", "day-2.jsonl"]
    assert all(file.url.startswith("memory://") for file in chosen.files)
    assert [file.rows for file in chosen.files] == [1, 2]
    assert chosen.content == ROW * 3
    assert len(jsonl_rows("joined", chosen.content, "exact")) == 3


@pytest.mark.parametrize(
    ("decision", "expected"),
    [(Decision.PROMOTED, 0), (Decision.REFUSED, 0), (Decision.FAILED, 1)],
)
def test_data_are_used_by_what_was_decided(
    tmp_path: Path, decision: Decision, expected: int
) -> None:
    (tmp_path / "a.jsonl").write_bytes(ROW)
    digest = hashlib.sha256(ROW).hexdigest()
    used = DataFile(url="elsewhere.jsonl", num_bytes=len(ROW), sha256=digest, rows=1)
    before = record(1, decision, tmp_path / "root", files=(used,))
    chosen = choose([f"{tmp_path}/a.jsonl"], [before], "exact", jsonl_rows)
    assert len(chosen.files) == expected


def test_folders_and_missing_places_hold_no_data(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    assert find_files(f"{tmp_path}/*.jsonl") == []
    assert find_files(f"{tmp_path}/nowhere/*.jsonl") == []


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(ConfigurationError, match="nosuchscheme"):
        find_files("nosuchscheme://bucket/*.jsonl")


@pytest.mark.parametrize(
    ("workflow_id", "name"),
    [
        ("retrain/weekly-2026-01-05T03:00:00Z", "weekly-2026-01-05T030000Z"),
        ("retrain/weekly", "weekly"),
        ("weekly", "weekly"),
    ],
)
def test_a_firing_is_named_after_its_workflow(workflow_id: str, name: str) -> None:
    assert firing_name(workflow_id) == name


def test_two_workflows_never_share_a_name() -> None:
    ids = [
        "xT03:00:00Z",
        "xT030000Z",
        "x:1",
        "x1",
        "retrain/x2",
        "x-2",
        "a/b",
        "a-b",
        "a b",
        "é",
        "-",
        "x" * 120,
        "x" * 121,
        "x" * 122,
    ]
    names = [firing_name(each) for each in ids]
    assert len(set(names)) == len(ids)
    assert all(0 < len(name) <= 120 and name[0].isalnum() for name in names)


def test_a_number_is_taken_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert append_record(store, record(1, Decision.REFUSED, tmp_path))
    assert not append_record(store, record(1, Decision.PROMOTED, tmp_path))
    assert [each.decision for each in read_lineage(store)] == [Decision.REFUSED]
    assert point_to_newest(store) is None


def test_a_missing_or_damaged_record_is_told(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in (1, 2):
        append_record(store, record(number, Decision.PROMOTED, tmp_path))
    (tmp_path / layout.lineage_record(1)).rename(tmp_path / "set-aside")
    with pytest.raises(ContractViolation, match=r"00000001\.json is missing"):
        read_lineage(store)
    (tmp_path / layout.lineage_record(1)).write_text("{}")
    with pytest.raises(ContractViolation, match="is no lineage record"):
        read_lineage(store)


def test_the_digest_of_a_folder_is_what_the_guide_computes(tmp_path: Path) -> None:
    for name, content in (("b.bin", b"\0" * 9), ("B.json", b"{}"), ("a", b""), (".hidden", b"x")):
        (tmp_path / name).write_bytes(content)
    shell = "LC_ALL=C sha256sum * | sha256sum"
    done = subprocess.run(shell, shell=True, cwd=tmp_path, capture_output=True, check=True)
    assert digest_folder(str(tmp_path)).digest == done.stdout.split()[0].decode()


def require_servable(root: Path) -> int:
    """What a serving system relies on; the number of the record that the pointer names."""
    pointer = read_pointer(Store(root))
    if pointer is None:
        return 0
    named = read_lineage(Store(root))[pointer.record - 1]
    assert named.decision is Decision.PROMOTED
    assert digest_folder(pointer.export).digest == pointer.digest
    return pointer.record


def test_a_pointer_survives_kills_at_any_moment(tmp_path: Path) -> None:
    """A reader looks all the time; after each kill the next one to come puts the pointer right."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.promotions"])
    chance = random.Random(7)
    store = Store(tmp_path)
    for _ in range(10):
        process = context.Process(target=promote_for_ever, args=(str(tmp_path),), daemon=True)
        wanted = len(store.list(layout.LINEAGE)) + chance.randint(1, 3)
        deadline = time.monotonic() + 30
        process.start()
        while len(store.list(layout.LINEAGE)) < wanted:
            assert time.monotonic() < deadline
            require_servable(tmp_path)
        time.sleep(chance.uniform(0, 0.004))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        require_servable(tmp_path)
        point_to_newest(store)
        newest = newest_promotion(read_lineage(store))
        assert newest is not None
        assert require_servable(tmp_path) == newest.number
