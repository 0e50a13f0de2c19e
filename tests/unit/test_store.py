"""Store: atomic local writes, exclusive creation, JSONL appends, error translation."""

import errno
import hashlib
import multiprocessing
import os
import signal
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from activities.storage import atomic
from activities.storage.store import Store, free_bytes
from models.errors import ConfigurationError, ContractViolation, StorageFull


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store(tmp_path / "root")
    return Store(f"memory://{uuid.uuid4().hex}/root")


def test_bytes_come_back_with_size_and_digest(store: Store) -> None:
    store.write_bytes("a/b/c.bin", b"abc")
    store.write_bytes("a/b/c.bin", b"abcd")
    assert store.read_bytes("a/b/c.bin") == b"abcd"
    assert store.size("a/b/c.bin") == 4
    # SHA-256 of "abcd", computed by coreutils
    expected = "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589"
    assert store.sha256("a/b/c.bin") == expected


def test_missing_things(store: Store) -> None:
    assert not store.exists("nothing")
    assert store.list("nothing") == []
    assert store.read_jsonl("nothing.jsonl") == ([], 0)
    store.remove_tree("nothing")
    with pytest.raises(FileNotFoundError):
        store.read_bytes("nothing")


def test_listing_is_sorted_and_hides_temporaries(store: Store) -> None:
    for name in ("b.json", "a.json", ".staged"):
        store.write_bytes(f"x/{name}", b"")
    assert store.list("x") == ["a.json", "b.json"]
    assert store.list("x", hidden=True) == [".staged", "a.json", "b.json"]


def test_json_is_sorted_and_indented(store: Store) -> None:
    store.write_json("v.json", {"b": [1, 2], "a": "ü"})
    expected = '{\n  "a": "ü",\n  "b": [\n    1,\n    2\n  ]\n}\n'
    assert store.read_bytes("v.json").decode() == expected
    assert store.read_json("v.json") == {"a": "ü", "b": [1, 2]}


def test_broken_json_names_its_file(store: Store) -> None:
    store.write_bytes("v.json", b'{"a": ')
    with pytest.raises(ContractViolation, match=r"v\.json is not valid JSON"):
        store.read_json("v.json")


def test_exclusive_creation_keeps_the_first(store: Store) -> None:
    assert store.create_exclusive("lease/one", b"first")
    assert not store.create_exclusive("lease/one", b"second")
    assert store.read_bytes("lease/one") == b"first"
    assert store.list("lease", hidden=True) == ["one"]


def test_one_of_many_threads_creates(store: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        for turn in range(20):
            path = f"lease/{turn}"
            results = list(
                pool.map(lambda n, p=path: store.create_exclusive(p, b"%d" % n), range(16))
            )
            assert results.count(True) == 1
            assert store.read_bytes(path) == b"%d" % results.index(True)


def test_exclusive_creation_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOTSUP, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    store = Store(tmp_path)
    assert store.create_exclusive("x", b"first")
    assert not store.create_exclusive("x", b"second")
    assert store.read_bytes("x") == b"first"


def test_rename_and_remove(store: Store) -> None:
    store.write_bytes("old/deep/file", b"1")
    store.rename("old", "new/place")
    assert not store.exists("old")
    assert store.read_bytes("new/place/deep/file") == b"1"
    store.remove_tree("new/place/deep/file")
    store.remove_tree("new")
    assert not store.exists("new")


def test_files_travel(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source.bin"
    source.write_bytes(os.urandom(3_000_000))
    store.put_file(source, "w/model.bin")
    assert store.sha256("w/model.bin") == hashlib.sha256(source.read_bytes()).hexdigest()
    store.get_file("w/model.bin", tmp_path / "back" / "model.bin")
    assert (tmp_path / "back" / "model.bin").read_bytes() == source.read_bytes()


def test_the_newest_row_is_read_alone(store: Store) -> None:
    assert store.last_jsonl("rows.jsonl") is None
    for number in range(3):
        store.append_jsonl("rows.jsonl", {"n": number})
        assert store.last_jsonl("rows.jsonl") == {"n": number}


def test_the_newest_whole_row_of_a_torn_or_long_file_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with (tmp_path / "rows.jsonl").open("wb") as stream:
        for number in range(4):
            stream.write(b'{"n": %d, "pad": "%s"}\n' % (number, b"x" * 600_000))
    row = store.last_jsonl("rows.jsonl")
    assert row is not None
    assert row["n"] == 3
    with (tmp_path / "rows.jsonl").open("ab") as stream:
        stream.write(b'{"n": 4, "pa')
    row = store.last_jsonl("rows.jsonl")
    assert row is not None
    assert row["n"] == 3


def test_jsonl_rows_come_back_in_order(store: Store) -> None:
    for number in range(5):
        store.append_jsonl("m/rows.jsonl", {"n": number, "text": "a\u2028b\nc"})
    rows, torn = store.read_jsonl("m/rows.jsonl")
    assert [row["n"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[0]["text"] == "a\u2028b\nc"
    assert torn == 0


def test_torn_tail_is_skipped_and_ended_by_the_next_append(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append_jsonl("rows.jsonl", {"n": 0})
    with (tmp_path / "rows.jsonl").open("ab") as stream:
        stream.write(b'{"n": 1, "te')
    assert store.read_jsonl("rows.jsonl") == ([{"n": 0}], 1)
    store.append_jsonl("rows.jsonl", {"n": 2})
    assert store.read_jsonl("rows.jsonl") == ([{"n": 0}, {"n": 2}], 1)
    assert list(store.each_jsonl("rows.jsonl")) == [{"n": 0}, {"n": 2}]


def test_whole_row_without_its_line_feed_counts(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"n": 0}\n{"n": 1}')
    store = Store(tmp_path)
    store.append_jsonl("rows.jsonl", {"n": 2})
    assert store.read_jsonl("rows.jsonl") == ([{"n": 0}, {"n": 1}, {"n": 2}], 0)


def test_every_prefix_of_a_line_is_survived(tmp_path: Path) -> None:
    line = b'{"a":"x\\"y","n":12}\n'
    for cut in range(1, len(line) - 1):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(b'{"first":1}\n' + line[:cut])
        store = Store(tmp_path)
        store.append_jsonl(path.name, {"last": 1})
        assert store.read_jsonl(path.name) == ([{"first": 1}, {"last": 1}], 1), cut


def _append_many(root: str, writer: int) -> None:
    store = Store(root)
    for number in range(200):
        store.append_jsonl("rows.jsonl", {"writer": writer, "n": number, "pad": "x" * 300})


def test_concurrent_processes_never_mix_lines(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append_many, args=(str(tmp_path), n)) for n in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(40)
        assert process.exitcode == 0
    rows, torn = Store(tmp_path).read_jsonl("rows.jsonl")
    assert torn == 0
    assert len(rows) == 600
    for writer in range(3):
        own = [row["n"] for row in rows if row["writer"] == writer]
        assert own == list(range(200))


def test_non_finite_numbers_become_null(store: Store) -> None:
    store.append_jsonl("rows.jsonl", {"a": float("nan"), "b": float("inf")})
    assert store.read_jsonl("rows.jsonl").rows == [{"a": None, "b": None}]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.write_bytes("deep/file.bin", b"new"),
        lambda store: store.create_exclusive("deep/other.bin", b"new"),
        lambda store: store.write_json("deep/file.bin", {}),
    ],
)
def test_full_disk_names_the_file_and_keeps_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, write: Callable[[Store], object]
) -> None:
    store = Store(tmp_path)
    store.write_bytes("deep/file.bin", b"old")

    def full(_: int) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match=str(tmp_path / "deep")):
        write(store)
    assert store.read_bytes("deep/file.bin") == b"old"
    assert os.listdir(tmp_path / "deep") == ["file.bin"]


def test_full_disk_on_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.append_jsonl("rows.jsonl", {"n": 0})
    real_write = os.write

    def half(descriptor: int, data: bytes) -> int:
        if len(data) > 3:
            return real_write(descriptor, data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(StorageFull, match=r"rows\.jsonl"):
            store.append_jsonl("rows.jsonl", {"n": 1})
    store.append_jsonl("rows.jsonl", {"n": 2})
    assert store.read_jsonl("rows.jsonl") == ([{"n": 0}, {"n": 2}], 1)


def test_write_order_is_content_then_name_then_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d").mkdir()
    events: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"
        events.append(f"fsync {kind}")
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        events.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    atomic.write_file(tmp_path / "d" / "f", b"x")
    assert events == ["fsync file", "rename", "fsync folder"]


def test_root_that_is_a_file_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = Store(tmp_path / "file" / "run")
    with pytest.raises(ConfigurationError, match=r"output\.root"):
        store.write_bytes("a", b"")
    assert not store.exists("a")
    assert store.list("") == []


def test_read_only_root_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigurationError, match="Read-only file system"):
        Store(tmp_path / "new").write_bytes("a", b"")


def test_unknown_scheme_and_missing_extra() -> None:
    with pytest.raises(ConfigurationError, match="nosuch"):
        Store("nosuch://bucket/run")
    with pytest.raises(ConfigurationError, match=r"perdure\[gcs\]"):
        Store("gs://bucket/run")


def test_only_local_roots_have_paths(tmp_path: Path) -> None:
    assert Store(tmp_path).local_path("a/b") == tmp_path / "a" / "b"
    with pytest.raises(ConfigurationError, match=r"memory://x/a"):
        Store("memory://x").local_path("a")


@pytest.mark.parametrize("rel", ["../x", "/etc/passwd", "a/../../x"])
def test_paths_stay_inside_the_root(tmp_path: Path, rel: str) -> None:
    with pytest.raises(ValueError, match="inside the output root"):
        Store(tmp_path).write_bytes(rel, b"")


def test_free_bytes(tmp_path: Path) -> None:
    usage = os.statvfs(tmp_path)
    free = free_bytes(tmp_path / "not" / "yet")
    assert free is not None
    assert free == pytest.approx(usage.f_bavail * usage.f_frsize, rel=0.05)
    assert free_bytes("memory://x") is None
    assert free_bytes("/proc/no-file-system-with-a-size") is None


def test_a_file_system_that_takes_no_folders_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot write /proc/perdure/x/file: "):
        Store("/proc/perdure/x").write_bytes("file", b"")


def _claim_for_ever(root: str, ready: "multiprocessing.synchronize.Event") -> None:
    store = Store(root)
    number = 0
    while True:
        store.create_exclusive(f"lease/{number:06d}", b"x" * 4096)
        store.write_bytes("state", b"%d" % number * 1000)
        number += 1
        if number == 20:
            ready.set()


def test_sigkill_leaves_no_partial_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_claim_for_ever, args=(str(tmp_path), ready))
    process.start()
    assert ready.wait(30)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    store = Store(tmp_path)
    claims = store.list("lease")
    assert len(claims) >= 20
    assert {store.size(f"lease/{name}") for name in claims} == {4096}
    state = store.read_bytes("state")
    assert state == state[: len(state) // 1000] * 1000
