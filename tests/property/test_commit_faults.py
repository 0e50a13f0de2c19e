"""Every write of a commit fails once: the run always resumes from a whole checkpoint.

Two kinds of faults: the n-th call of the store fails (before or after its effect, as when a kill
or a lost answer hits), and the n-th system call underneath fails with a full disk.
"""

import errno
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activities.storage import commit, layout
from activities.storage.store import Store
from models.checkpoint import CheckpointFile, CheckpointRef, PolicyClock
from models.errors import StorageFull
from models.ids import FenceToken, RunRef
from models.prompt import DataState


class Killed(BaseException):
    """The process dies here."""


class FaultyStore(Store):
    """Dies at the n-th write; ``after`` lets that write take effect first."""

    def __init__(self, root: Path, fail_at: int, after: bool) -> None:
        super().__init__(root)
        self.writes = 0
        self._fail_at = fail_at
        self._after = after

    def _count(self, write: Callable[[], Any]) -> Any:
        self.writes += 1
        if self.writes != self._fail_at:
            return write()
        if self._after:
            write()
        raise Killed

    def write_bytes(self, rel: str, data: bytes) -> None:
        self._count(lambda: super(FaultyStore, self).write_bytes(rel, data))

    def create_exclusive(self, rel: str, data: bytes) -> bool:
        return bool(self._count(lambda: super(FaultyStore, self).create_exclusive(rel, data)))

    def make_durable(self, rel: str) -> None:
        self._count(lambda: super(FaultyStore, self).make_durable(rel))

    def remove_tree(self, rel: str) -> None:
        self._count(lambda: super(FaultyStore, self).remove_tree(rel))


def cursor_of(update: int) -> DataState:
    return DataState(sample_offset=10 * update, train_sha256="t")


def save(store: Store, update: int, attempt: int = 1, keep_last: int | None = 1) -> CheckpointRef:
    token = FenceToken(epoch=1, update=update, attempt=attempt)
    folder = layout.checkpoint_folder(update, token)
    data = b"weights of %d" % update * 100
    store.write_bytes(f"{folder}/model.safetensors", data)
    file = CheckpointFile(
        path="model.safetensors", sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data)
    )
    clock = PolicyClock(
        completed_steps=update + 1, published_step=update, next_rollout_id=update + 1
    )
    run = RunRef(run_id="r", root=store.root, spec_sha256="s")
    ref = commit.commit_checkpoint(store, run, token, clock, cursor_of(update), (file,), folder)
    commit.retain(store, keep_last, None, ref)
    return ref


def require_whole(store: Store, allowed: set[int]) -> CheckpointRef:
    newest = commit.newest_checkpoint(store)
    assert newest is not None
    assert newest.update in allowed
    commit.verify_checkpoint(store, newest)
    assert commit.read_cursor(store, newest) == cursor_of(newest.update)
    return newest


def has_marker(store: Store, update: int, attempt: int) -> bool:
    token = FenceToken(epoch=1, update=update, attempt=attempt)
    return store.exists(f"{layout.checkpoint_folder(update, token)}/complete.json")


@pytest.mark.parametrize("after", [False, True], ids=["before effect", "after effect"])
def test_death_at_every_store_write(tmp_path: Path, after: bool) -> None:
    for fail_at in itertools.count(1):
        root = tmp_path / str(fail_at)
        clean = Store(root)
        save(clean, 0)
        faulty = FaultyStore(root, fail_at, after)
        try:
            save(faulty, 1)
        except Killed:
            newest = require_whole(clean, {0, 1})
            assert (newest.update == 1) == has_marker(clean, 1, 1)
            assert save(clean, 1, attempt=2).update == 1
            assert require_whole(clean, {1}).folder.endswith("a2")
            continue
        # trainer file, cursor, two flushes, marker, pointer, then two removals
        assert fail_at == 9
        assert faulty.writes == 8
        break


@contextmanager
def disk_full_at(patch: pytest.MonkeyPatch, fail_at: int) -> Iterator[list[int]]:
    """The n-th file-system change (fsync, rename, link) finds the disk full."""
    calls = [0]

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == fail_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return call

    with patch.context() as inner:
        for name in ("fsync", "replace", "link"):
            inner.setattr(os, name, wrap(getattr(os, name)))
        yield calls


def test_full_disk_at_every_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for fail_at in itertools.count(1):
        store = Store(tmp_path / str(fail_at))
        save(store, 0)
        try:
            with disk_full_at(monkeypatch, fail_at):
                save(store, 1)
        except StorageFull:
            newest = require_whole(store, {0, 1})
            assert (newest.update == 1) == has_marker(store, 1, 1)
            assert not any(Path(store.root).rglob("*.tmp"))
            save(store, 1, attempt=2)
            require_whole(store, {1})
            continue
        break
    assert fail_at > 12


@settings(max_examples=20, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 12), st.booleans(), st.sampled_from([1, 2, None])),
        min_size=1,
        max_size=8,
    )
)
def test_random_deaths_never_lose_a_committed_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool, int | None]]
) -> None:
    root = tmp_path_factory.mktemp("run")
    clean = Store(root)
    save(clean, 0)
    for attempt, (fail_at, after, keep_last) in enumerate(steps, start=1):
        reached = require_whole(clean, set(range(len(steps) + 1))).update
        try:
            save(FaultyStore(root, fail_at, after), reached + 1, attempt, keep_last)
        except Killed:
            require_whole(clean, {reached, reached + 1})
        else:
            require_whole(clean, {reached + 1})
