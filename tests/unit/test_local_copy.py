"""Folders of an object store on a host: once, proved, bounded, and safe among processes."""

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from activities.storage import host_cache, local_copy
from activities.storage.host_cache import (
    CACHE_DIR,
    CACHE_GIB,
    keep,
    kept_folders,
    lock_of,
    transfer_folder,
)
from activities.storage.host_lock import HostLock, Mode
from activities.storage.local_copy import FILES, has_folder, local_folder, put_folder
from activities.storage.store import Store
from models.errors import (
    ConfigurationError,
    ContractViolation,
    DigestMismatch,
    ServiceUnreachable,
    StorageFull,
)

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    yield Store(f"memory://bucket/{tmp_path.name}")
    for lock in local_copy._HELD.values():
        lock.give_up()
    local_copy._HELD.clear()


def give_up_all() -> None:
    for lock in local_copy._HELD.values():
        lock.give_up()
    local_copy._HELD.clear()


def put(store: Store, tmp_path: Path, rel: str, **files: bytes) -> None:
    source = tmp_path / "source" / rel
    for name, data in files.items():
        path = source / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    put_folder(store, source, rel)


def test_a_folder_comes_back_as_it_was_put(store: Store, tmp_path: Path) -> None:
    put(store, tmp_path, "hf", config=b"{}", deep__weights=b"\0" * 100)
    folder = local_folder(store, "hf")
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert found == {"config": b"{}", "deep/weights": b"\0" * 100}
    assert store.list("hf") == ["config", "deep"], "the list of files is hidden"


def test_a_folder_on_a_local_root_is_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    assert local_folder(Store(tmp_path), "hf") == tmp_path / "hf"
    assert has_folder(Store(tmp_path), "hf")
    assert not has_folder(Store(tmp_path), "other")


def test_it_is_downloaded_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, tmp_path, "hf", weights=b"1")
    first = local_folder(store, "hf")
    give_up_all()
    monkeypatch.setattr(Store, "get_file", lambda *_: pytest.fail("downloaded again"))
    assert local_folder(store, "hf") == first
    put(store, tmp_path, "copy", weights=b"1")
    assert local_folder(store, "copy") == first, "equal content is one folder"


def test_an_unfinished_folder_does_not_count(store: Store, tmp_path: Path) -> None:
    store.write_bytes("hf/weights", b"1")
    assert not has_folder(store, "hf")
    with pytest.raises(FileNotFoundError):
        local_folder(store, "hf")


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_what_the_store_holds_is_proved(store: Store, tmp_path: Path, damage: str) -> None:
    put(store, tmp_path, "hf", weights=b"right")
    if damage == "changed":
        store.write_bytes("hf/weights", b"wrong")
    else:
        store.remove_tree("hf/weights")
    for _ in range(2):  # a refused download leaves nothing that the next call would take
        with pytest.raises(DigestMismatch, match="hf/weights"):
            local_folder(store, "hf")
    assert list((tmp_path / "cache" / "transfer").iterdir()) == []


def test_files_that_changed_in_the_cache_are_fetched_again(store: Store, tmp_path: Path) -> None:
    put(store, tmp_path, "hf", weights=b"right")
    folder = local_folder(store, "hf")
    (folder / "weights").write_bytes(b"wrong")
    assert (local_folder(store, "hf") / "weights").read_bytes() == b"right"


@pytest.mark.parametrize("path", ["../outside", "/etc/outside"])
def test_no_file_leaves_its_folder(store: Store, tmp_path: Path, path: str) -> None:
    put(store, tmp_path, "hf", weights=b"1")
    listed = store.read_bytes(f"hf/{FILES}").replace(b'"weights"', f'"{path}"'.encode())
    store.write_bytes(f"hf/{FILES}", listed)
    with pytest.raises((ContractViolation, ValueError)):
        local_folder(store, "hf")
    store.write_bytes(f"hf/{FILES}", b"no list")
    with pytest.raises(ContractViolation, match="no list of files"):
        local_folder(store, "hf")


def test_the_cache_is_bounded(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_GIB, str(3 / 1024))
    folders = []
    for name in "abc":
        put(store, tmp_path, name, weights=name.encode() * MIB)
        folders.append(local_folder(store, name))
        os.utime(f"{folders[-1]}.lock", (len(folders), len(folders)))
    put(store, tmp_path, "d", weights=b"d" * MIB)
    with pytest.raises(StorageFull, match=CACHE_GIB):
        local_folder(store, "d")  # all are held
    assert all(folder.is_dir() for folder in folders)
    give_up_all()
    assert local_folder(store, "b") == folders[1]
    local_folder(store, "d")
    assert [folder.is_dir() for folder in folders] == [False, True, True], "the oldest goes first"


def in_cache() -> int:
    return sum(path.stat().st_size for path in kept_folders().rglob("data"))


def test_transfers_at_once_share_the_limit(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_GIB, str(3 / 1024))
    with transfer_folder(2 * MIB) as first:
        for written in (0, MIB, 2 * MIB):
            (first / "data").write_bytes(b"x" * written)
            with transfer_folder(MIB), pytest.raises(StorageFull), transfer_folder(MIB):
                pass
        keep(first, kept_folders() / "first")
        lock_of(kept_folders() / "first").touch()
        with transfer_folder(MIB), pytest.raises(StorageFull), transfer_folder(3 * MIB):
            pass
    with transfer_folder(3 * MIB):
        assert in_cache() == 0, "nobody held it"


def _fill_and_evict(cache: str, number: int, told: Connection) -> None:
    os.environ |= {CACHE_DIR: cache, CACHE_GIB: str(5 / 1024)}
    most = 0
    for index in range(15):
        entry = kept_folders() / f"{number}-{index}"
        with HostLock(lock_of(entry)).held(Mode.ALONE, 0), transfer_folder(MIB) as folder:
            (folder / "data").write_bytes(b"x" * MIB)
            keep(folder, entry)
            most = max(most, len(list(kept_folders().glob("*/data"))))
    told.send(most)


def test_processes_that_evict_at_once_neither_fail_nor_exceed_the_limit(
    store: Store, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    arguments = [(os.environ[CACHE_DIR], number, theirs) for number in range(3)]
    processes = [context.Process(target=_fill_and_evict, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert all(ours.recv() <= 5 for _ in processes)
    assert 0 < in_cache() <= 5 * MIB


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, tmp_path, "hf", weights=b"w" * MIB)
    monkeypatch.setattr(host_cache, "free_bytes", lambda _: 1000)
    with pytest.raises(StorageFull) as caught:
        local_folder(store, "hf")
    message = str(caught.value)
    assert f"{tmp_path}/cache: {MIB} bytes do not fit: 1000 bytes are free" in message
    assert CACHE_DIR in message
    assert CACHE_GIB in message


def test_a_disk_that_others_fill_meanwhile_is_told_as_well(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, tmp_path, "hf", weights=b"w" * MIB)

    def full(_store: Store, _rel: str, local: Path) -> None:
        local.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Store, "get_file", full)
    with pytest.raises(StorageFull, match=f"{MIB} bytes do not fit: .* in {CACHE_DIR}"):
        local_folder(store, "hf")
    assert list((tmp_path / "cache" / "transfer").iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    assert (local_folder(store, "hf") / "weights").stat().st_size == MIB


@pytest.mark.parametrize("text", ["much", "0", "-1", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(CACHE_GIB, text)
    put(store, tmp_path, "hf", weights=b"1")
    with pytest.raises(ConfigurationError, match=CACHE_GIB):
        local_folder(store, "hf")


def _transfers_for_ever(cache: str, told: Connection) -> None:
    os.environ[CACHE_DIR] = cache
    with transfer_folder() as folder:
        (folder / "half").write_bytes(b"1")
        told.send(str(folder))
        signal.pause()


def test_what_a_killed_process_left_is_removed(store: Store, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_transfers_for_ever, args=(os.environ[CACHE_DIR], theirs))
    process.start()
    assert ours.poll(50)
    left = Path(ours.recv())
    with transfer_folder():
        assert (left / "half").exists(), "a living process keeps its own"
    process.kill()
    process.join(50)
    with transfer_folder() as folder:
        assert not left.exists()
        assert folder.is_dir()


def test_a_lock_is_shared_or_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = HostLock(path), HostLock(path)
    first.take(Mode.SHARED, 0)
    second.take(Mode.SHARED, 0)
    started = time.monotonic()
    with pytest.raises(ServiceUnreachable, match="held by other processes"):
        HostLock(path).take(Mode.ALONE, 0.1)
    assert time.monotonic() - started >= 0.1
    first.give_up()
    second.give_up()
    with HostLock(path).held(Mode.ALONE, 0), pytest.raises(ServiceUnreachable):
        first.take(Mode.SHARED, 0)
    path.unlink()
    with HostLock(path).held(Mode.ALONE, 0):
        assert path.exists()
