"""Commit protocol: what counts as a checkpoint, and which one a run resumes from."""

import hashlib
import json
import uuid
from pathlib import Path

import pytest

from activities.storage import commit, layout, lease
from activities.storage.store import Store
from models.checkpoint import CheckpointFile, CheckpointRef, PolicyClock
from models.errors import ContractViolation, DigestMismatch, StaleFence
from models.ids import FenceToken, RunRef
from models.prompt import DataState, PromptDraw

PENDING = PromptDraw(
    group_index=2, first_sample_index=4, epoch_id=0, row=2, prepared_sample_id="t:train:2"
)
CURSOR = DataState(
    sample_offset=3, sample_group_index=3, sample_index=6, pending=(PENDING,), train_sha256="ab"
)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store(tmp_path / "root")
    return Store(f"memory://{uuid.uuid4().hex}/root")


def run_of(store: Store, spec: str = "5bec") -> RunRef:
    return RunRef(run_id="train/a", root=store.root, spec_sha256=spec)


def write_trainer_files(store: Store, folder: str, content: bytes) -> tuple[CheckpointFile, ...]:
    files = []
    for path in ("model.safetensors", "state/optimizer.bin"):
        data = content + path.encode()
        store.write_bytes(f"{folder}/{path}", data)
        digest = hashlib.sha256(data).hexdigest()
        files.append(CheckpointFile(path=path, sha256=digest, num_bytes=len(data)))
    return tuple(files)


def save(store: Store, update: int, epoch: int = 1, attempt: int = 1) -> CheckpointRef:
    token = FenceToken(epoch=epoch, update=update, attempt=attempt)
    folder = layout.checkpoint_folder(update, token)
    files = write_trainer_files(store, folder, b"%d.%d.%d" % (update, epoch, attempt))
    clock = PolicyClock(
        completed_steps=2 * (update + 1), published_step=2 * update, next_rollout_id=update + 1
    )
    return commit.commit_checkpoint(store, run_of(store), token, clock, CURSOR, files, folder)


def test_no_checkpoint(store: Store) -> None:
    assert commit.newest_checkpoint(store) is None


def test_commit_and_read_back(store: Store) -> None:
    ref = save(store, 4)
    assert ref.update == 4
    assert ref.policy_version == 10
    assert ref.folder == "checkpoints/core/rollout_0000004.e1u4a1"
    newest = commit.newest_checkpoint(store)
    assert newest is not None
    assert newest.model_copy(update={"seconds": ref.seconds}) == ref
    marker = commit.verify_checkpoint(store, ref)
    assert marker.run_id == "train/a"
    assert marker.spec_sha256 == "5bec"
    assert [file.path for file in marker.files] == [
        "model.safetensors",
        "state/optimizer.bin",
        "cursor.json",
    ]
    assert marker.cursor_sha256 == store.sha256(f"{ref.folder}/cursor.json")
    assert ref.marker_sha256 == store.sha256(f"{ref.folder}/complete.json")
    assert commit.read_cursor(store, ref) == CURSOR
    assert store.read_json("checkpoints/core-latest.json")["rollout_id"] == 4


@pytest.mark.parametrize("file", ["model.safetensors", "state/optimizer.bin", "cursor.json"])
def test_flipped_byte_is_refused_by_name(store: Store, file: str) -> None:
    ref = save(store, 0)
    data = bytearray(store.read_bytes(f"{ref.folder}/{file}"))
    data[len(data) // 2] ^= 1
    store.write_bytes(f"{ref.folder}/{file}", bytes(data))
    with pytest.raises(DigestMismatch, match=file):
        commit.verify_checkpoint(store, ref)
    if file == "cursor.json":
        with pytest.raises(DigestMismatch, match=file):
            commit.read_cursor(store, ref)


def test_altered_marker_is_refused(store: Store) -> None:
    ref = save(store, 0)
    marker = json.loads(store.read_bytes(f"{ref.folder}/complete.json"))
    marker["clock"]["next_rollout_id"] = 7
    store.write_json(f"{ref.folder}/complete.json", marker)
    with pytest.raises(DigestMismatch, match=r"complete\.json"):
        commit.read_marker(store, ref)


def test_newest_wins_over_stale_and_missing_pointer(store: Store) -> None:
    save(store, 4)
    pointer = store.read_bytes(layout.LATEST)
    newer = save(store, 9)
    store.write_bytes(layout.LATEST, pointer)
    found = commit.newest_checkpoint(store)
    assert found is not None
    assert found.folder == newer.folder
    store.remove_tree(layout.LATEST)
    found = commit.newest_checkpoint(store)
    assert found is not None
    assert found.folder == newer.folder


def test_order_is_update_then_epoch_then_fence(store: Store) -> None:
    order = [(9, 1, 1), (9, 1, 2), (9, 2, 1), (10, 1, 1), (100, 1, 1)]
    for update, epoch, attempt in order:
        saved = save(store, update, epoch, attempt)
        newest = commit.newest_checkpoint(store)
        assert newest is not None
        assert newest.folder == saved.folder
    save(store, 9, 3, 9)
    newest = commit.newest_checkpoint(store)
    assert newest is not None
    assert newest.folder == saved.folder


@pytest.mark.parametrize("marker", [b"", b'{"schema_version": 2', b"[]", b'{"run_id": "x"}'])
def test_marker_that_does_not_parse_does_not_count(store: Store, marker: bytes) -> None:
    good = save(store, 4)
    store.write_bytes("checkpoints/core/rollout_0000009.e1u9a1/complete.json", marker)
    newest = commit.newest_checkpoint(store)
    assert newest is not None
    assert newest.folder == good.folder


@pytest.mark.parametrize("harm", ["truncate", "remove"])
def test_damaged_newest_gives_way_but_never_to_nothing(store: Store, harm: str) -> None:
    good, damaged = save(store, 4), save(store, 9)
    path = f"{damaged.folder}/model.safetensors"
    if harm == "truncate":
        store.write_bytes(path, store.read_bytes(path)[:-1])
    else:
        store.remove_tree(path)
    newest = commit.newest_checkpoint(store)
    assert newest is not None
    assert newest.folder == good.folder
    store.remove_tree(good.folder)
    with pytest.raises(DigestMismatch, match=r"rollout_0000009.*model\.safetensors"):
        commit.newest_checkpoint(store)


def test_marker_of_a_newer_version_is_not_passed_over(store: Store) -> None:
    save(store, 4)
    ref = save(store, 9)
    marker = store.read_json(f"{ref.folder}/complete.json") | {"schema_version": 3}
    store.write_json(f"{ref.folder}/complete.json", marker)
    with pytest.raises(ContractViolation, match="schema 3"):
        commit.newest_checkpoint(store)


def test_file_that_differs_from_the_report_is_never_committed(store: Store) -> None:
    good = save(store, 0)
    token = FenceToken(epoch=1, update=1, attempt=1)
    folder = layout.checkpoint_folder(1, token)
    files = write_trainer_files(store, folder, b"x")
    store.write_bytes(f"{folder}/model.safetensors", b"y" * files[0].num_bytes)
    clock = PolicyClock(completed_steps=2, published_step=1, next_rollout_id=2)
    with pytest.raises(DigestMismatch, match=r"model\.safetensors"):
        commit.commit_checkpoint(store, run_of(store), token, clock, CURSOR, files, folder)
    newest = commit.newest_checkpoint(store)
    assert newest is not None
    assert newest.folder == good.folder


def test_repeated_commit_returns_the_same(store: Store) -> None:
    first = save(store, 3)
    store.remove_tree(layout.LATEST)
    second = save(store, 3)
    assert second.marker_sha256 == first.marker_sha256
    assert store.exists(layout.LATEST)


def test_same_folder_with_other_content_is_refused(store: Store) -> None:
    ref = save(store, 3)
    token = FenceToken(epoch=1, update=3, attempt=1)
    clock = commit.read_marker(store, ref).clock
    files = write_trainer_files(store, "elsewhere", b"other")
    with pytest.raises(ContractViolation, match="committed already"):
        commit.commit_checkpoint(store, run_of(store), token, clock, CURSOR, files, ref.folder)


def test_folder_must_be_the_tokens(store: Store) -> None:
    token = FenceToken(epoch=1, update=3, attempt=2)
    folder = layout.checkpoint_folder(3, FenceToken(epoch=1, update=3, attempt=1))
    clock = PolicyClock(completed_steps=4, published_step=3, next_rollout_id=4)
    with pytest.raises(ContractViolation, match="e1u3a2"):
        commit.commit_checkpoint(store, run_of(store), token, clock, CURSOR, (), folder)


def test_older_epoch_cannot_commit(store: Store) -> None:
    owner = lease.Owner(run_id="train/a", namespace="default", cluster_id="c")
    assert lease.claim_epoch(store, owner) == 1
    save(store, 0, epoch=1)
    assert lease.claim_epoch(store, owner) == 2
    with pytest.raises(StaleFence):
        save(store, 1, epoch=1)
    save(store, 1, epoch=2)
    lease.revoke_epoch(store, 2)
    with pytest.raises(StaleFence):
        save(store, 2, epoch=2)
    newest = commit.newest_checkpoint(store)
    assert newest is not None
    assert newest.update == 1


def test_a_commit_that_was_checked_before_a_claim_cannot_come_after_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epoch 1 stands still between its last check and its marker; epoch 2 goes back and trains."""
    owner = lease.Owner(run_id="train/a", namespace="default", cluster_id="c")
    assert lease.claim_epoch(store, owner) == 1
    save(store, 3, epoch=1)
    create = store.create_exclusive
    found: list[CheckpointRef | None] = []

    def late(rel: str, data: bytes) -> bool:
        monkeypatch.setattr(store, "create_exclusive", create)
        assert rel == "checkpoints/core/rollout_0000009.e1u9a1/complete.json"
        claim()
        save(store, 5, epoch=2)
        return create(rel, data)

    def claim() -> None:
        epoch = lease.claim_epoch(store, owner)
        commit.fence_off_commits(store, epoch)
        found.append(commit.newest_checkpoint(store))

    monkeypatch.setattr(store, "create_exclusive", late)
    with pytest.raises(StaleFence, match="newer epoch"):
        save(store, 9, epoch=1)
    claim()
    assert [each.update for each in found if each] == [3, 5]
    faults = {each.update: each.fault for each in commit.saved_folders(store)}
    assert faults == {3: "", 5: "", 9: "fenced off"}


def test_a_claim_fences_off_nothing_that_is_committed_or_its_own(store: Store) -> None:
    owner = lease.Owner(run_id="train/a", namespace="default", cluster_id="c")
    lease.claim_epoch(store, owner)
    torn = layout.checkpoint_folder(2, FenceToken(epoch=1, update=2, attempt=1))
    write_trainer_files(store, torn, b"torn")
    saved = save(store, 4, epoch=1)
    epoch = lease.claim_epoch(store, owner)
    own = layout.checkpoint_folder(6, FenceToken(epoch=epoch, update=6, attempt=1))
    write_trainer_files(store, own, b"own")
    commit.fence_off_commits(store, epoch)
    assert commit.verify_checkpoint(store, saved)
    assert not store.exists(f"{own}/{layout.COMPLETE}")
    faults = {each.update: each.fault for each in commit.saved_folders(store)}
    assert faults == {2: "fenced off", 4: "", 6: "missing"}
