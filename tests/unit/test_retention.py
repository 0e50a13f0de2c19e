"""Retention: which checkpoints stay. Worked cases: ids 4, 9, 14, 19, 24."""

from pathlib import Path

import pytest

from activities.storage import commit, layout
from activities.storage.lease import Owner, claim_epoch
from activities.storage.store import Store
from models.checkpoint import CheckpointRef, PolicyClock
from models.errors import ConfigurationError, StaleFence
from models.ids import FenceToken, RunRef
from models.prompt import DataState


def save(store: Store, update: int, epoch: int = 1) -> CheckpointRef:
    token = FenceToken(epoch=epoch, update=update, attempt=1)
    run = RunRef(run_id="r", root=store.root, spec_sha256="s")
    clock = PolicyClock(completed_steps=0, published_step=0, next_rollout_id=update + 1)
    folder = layout.checkpoint_folder(update, token)
    return commit.commit_checkpoint(store, run, token, clock, DataState(), (), folder)


def updates_of(store: Store) -> list[int]:
    return [int(name[8:15]) for name in store.list("checkpoints/core")]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (None, None, [4, 9, 14, 19, 24]),
        (1, None, [24]),
        (2, 10, [9, 19, 24]),
        (None, 10, [4, 9, 14, 19, 24]),
        (1, 5, [4, 9, 14, 19, 24]),
    ],
)
def test_kept_updates(
    tmp_path: Path, keep_last: int | None, keep_every: int | None, kept: list[int]
) -> None:
    store = Store(tmp_path)
    refs = [save(store, update) for update in (4, 9, 14, 19, 24)]
    commit.retain(store, keep_last, keep_every, refs[-1])
    assert updates_of(store) == kept


def test_successive_policies(tmp_path: Path) -> None:
    store = Store(tmp_path)
    refs = [save(store, update) for update in (4, 9, 14, 19)]
    removed = commit.retain(store, 2, 10, refs[-1])
    assert removed == (refs[0].folder,)
    removed = commit.retain(store, 1, None, refs[-1])
    assert sorted(removed) == sorted((refs[1].folder, refs[2].folder))
    assert updates_of(store) == [19]


def test_damaged_newest_does_not_cost_the_last_good_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    good, damaged = save(store, 4), save(store, 9)
    store.write_bytes(f"{damaged.folder}/cursor.json", b"short")
    assert commit.retain(store, 1, None, damaged) == ()
    newest = commit.newest_checkpoint(store)
    assert newest is not None
    assert newest.folder == good.folder


def test_incomplete_folders_of_older_epochs_go(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_bytes("checkpoints/core/rollout_0000002.e1u2a1/model.safetensors", b"torn")
    store.write_bytes("checkpoints/core/rollout_0000007.e2u7a1/model.safetensors", b"in work")
    store.write_bytes("checkpoints/core/notes/readme", b"not ours")
    latest = save(store, 4, epoch=2)
    assert commit.retain(store, 1, None, latest) == ("checkpoints/core/rollout_0000002.e1u2a1",)
    assert store.list("checkpoints/core") == [
        "notes",
        "rollout_0000004.e2u4a1",
        "rollout_0000007.e2u7a1",
    ]


def test_older_copies_of_an_update_go(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, 4, epoch=1)
    latest = save(store, 4, epoch=2)
    commit.retain(store, 5, None, latest)
    assert store.list("checkpoints/core") == ["rollout_0000004.e2u4a1"]


@pytest.mark.parametrize("fault", [OSError(5, "Input/output error"), ConfigurationError("no")])
def test_failed_deletion_is_a_warning_only(tmp_path: Path, fault: Exception) -> None:
    class Stuck(Store):
        def remove_tree(self, rel: str) -> None:
            if "rollout_0000004" in rel:
                raise fault
            super().remove_tree(rel)

    store = Stuck(tmp_path)
    for update in (4, 9):
        save(store, update)
    latest = save(store, 14)
    removed = commit.retain(store, 1, None, latest)
    assert removed == ("checkpoints/core/rollout_0000009.e1u9a1",)
    assert updates_of(store) == [4, 14]


def test_deletion_cut_short_leaves_nothing_that_counts(tmp_path: Path) -> None:
    class Cut(Store):
        def remove_tree(self, rel: str) -> None:
            if rel.endswith("a1"):
                raise OSError(5, "killed here")
            super().remove_tree(rel)

    store = Cut(tmp_path)
    old = save(store, 4)
    latest = save(store, 9)
    commit.retain(store, 1, None, latest)
    assert store.list(old.folder) == ["cursor.json"]
    newest = commit.newest_checkpoint(store)
    assert newest is not None
    assert newest.folder == latest.folder


def test_an_epoch_that_lost_the_root_deletes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    owner = Owner(run_id="r", namespace="default", cluster_id="c")
    assert claim_epoch(store, owner) == 1
    save(store, 4)
    latest = save(store, 9)
    assert claim_epoch(store, owner) == 2
    with pytest.raises(StaleFence, match="epoch 2 owns the root"):
        commit.retain(store, 1, None, latest)
    assert updates_of(store) == [4, 9]
