"""Fence, idempotency, file placement; what runs at the same time."""

import errno
import hashlib
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from activities.rollout.collection_file import write_collection
from activities.storage import layout
from activities.storage.host_cache import CACHE_DIR
from activities.storage.local_copy import has_folder
from activities.storage.objects import ObjectStore
from activities.storage.store import Store
from models.checkpoint import CheckpointMarker, PolicyClock
from models.errors import (
    ContractViolation,
    DigestMismatch,
    ServiceUnreachable,
    StaleFence,
    StorageFull,
)
from models.ids import FenceToken
from models.prompt import PreparedPrompt, PromptMetadata
from models.rollout import CollectionCounts, RolloutCollection
from workers.trainers import commands, guarded, host_copy, local
from workers.trainers.guarded import GuardedTrainer
from workers.trainers.local import LocalTrainer
from workers.trainers.weights import export_bases, own_exports

DEADLINE_S = 20


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "root")
    yield store
    for base in export_bases(store.root):
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def make_guarded(make_spec, model_dir, store):
    def make(**sections) -> GuardedTrainer:
        return GuardedTrainer(LocalTrainer(make_spec(**sections), model_dir), store)

    return make


@pytest.fixture
def commit(store, make_groups):
    """Write a collection and return its reference."""

    def write(update: int, seed: int = 0) -> RolloutCollection:
        uri = f"rollouts/{update}-{seed}.parquet"
        sha256 = write_collection(store, uri, make_groups(seed))
        counts = CollectionCounts(groups=2, samples=8, prompt_tokens=8, response_tokens=36)
        return RolloutCollection(
            update=update,
            epoch=1,
            uri=uri,
            sha256=sha256,
            counts=counts,
            reward_mean=0.5,
            min_version=0,
            max_version=0,
            seconds=1.0,
        )

    return write


def token(update: int = 0, attempt: int = 1, epoch: int = 1) -> FenceToken:
    return FenceToken(epoch=epoch, update=update, attempt=attempt)


def question() -> PreparedPrompt:
    return PreparedPrompt(
        input="abc=",
        label="cba",
        prompt_token_ids=(1, 40, 41),
        metadata=PromptMetadata(
            prepared_sample_id="t:eval:0",
            source_dataset="t",
            source_row=0,
            query="reverse abc=",
            verifiers=(),
            run_prompt_tokens=3,
            run_prompt_token_ids_sha256=hashlib.sha256(b"").hexdigest(),
        ),
    )


def test_a_repeated_update_returns_the_same_report(make_guarded, commit):
    trainer = make_guarded()
    report = trainer.optimize(token(), 0, commit(0))
    assert trainer.optimize(token(attempt=2), 0, commit(0)) == report
    assert (trainer.policy_version, trainer.next_update) == (1, 1)


def test_another_collection_for_an_applied_update_is_refused(make_guarded, commit):
    trainer = make_guarded()
    first, other = commit(0, seed=0), commit(0, seed=1)
    trainer.optimize(token(), 0, first)
    with pytest.raises(ContractViolation) as raised:
        trainer.optimize(token(attempt=2), 0, other)
    assert first.sha256 in raised.value.message
    assert other.sha256 in raised.value.message


@pytest.mark.parametrize(("update", "collection"), [(1, 1), (0, 1)])
def test_only_the_next_update_with_its_own_collection(make_guarded, commit, update, collection):
    with pytest.raises(ContractViolation, match="next update is 0"):
        make_guarded().optimize(token(), update, commit(collection))


def test_older_tokens_and_revoked_epochs_are_refused(make_guarded, commit):
    trainer = make_guarded()
    trainer.optimize(token(attempt=2), 0, commit(0))
    with pytest.raises(StaleFence):
        trainer.optimize(token(attempt=1), 0, commit(0))
    with pytest.raises(StaleFence):
        trainer.export_weights(token(update=0, attempt=1), 1)
    trainer.revoke(1)
    for call in (
        lambda: trainer.optimize(token(update=9), 1, commit(1)),
        lambda: trainer.export_weights(token(update=9), 1),
        lambda: trainer.save(token(update=9), "checkpoints/x"),
        lambda: trainer.export(token(update=9), "hf"),
        lambda: trainer.restore(
            token(update=9),
            "checkpoints/x",
            PolicyClock(completed_steps=0, published_step=-1, next_rollout_id=0),
        ),
    ):
        with pytest.raises(StaleFence, match="revoked"):
            call()
    assert trainer.export_weights(token(epoch=2), 1).version == 1


def test_an_identical_call_waits_for_the_running_one(make_guarded, commit, monkeypatch):
    trainer = make_guarded()
    collection = commit(0)
    entered, release = threading.Event(), threading.Event()
    calls = []
    read = commands.read_collection

    def slow_read(*args):
        calls.append(1)
        entered.set()
        assert release.wait(DEADLINE_S)
        return read(*args)

    monkeypatch.setattr(commands, "read_collection", slow_read)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(trainer.optimize, token(attempt=1), 0, collection)
        assert entered.wait(DEADLINE_S)
        second = pool.submit(trainer.optimize, token(attempt=2), 0, collection)
        assert trainer.exported() is None  # answered while the update runs
        assert trainer.progress().stage == "idle"
        release.set()
        reports = [call.result(DEADLINE_S) for call in (first, second)]
    assert reports[0] == reports[1]
    assert len(calls) == 1


def test_exports_are_kept_two_deep_and_repeat_themselves(make_guarded, commit, store):
    trainer = make_guarded()
    refs = [trainer.export_weights(token(), 0)]
    assert trainer.export_weights(token(), 0) == refs[0]
    for update in range(2):
        trainer.optimize(token(update), update, commit(update, seed=update))
        refs.append(trainer.export_weights(token(update), update + 1))
    assert trainer.exported() == refs[-1]
    kept = sorted(path.name for path in export_bases(store.root)[0].glob("trainer-*/*"))
    assert kept == ["v0000001", "v0000002"]
    trainer.close()
    assert list(export_bases(store.root)[0].glob("trainer-*/*")) == []


def test_save_and_restore_through_the_store(make_guarded, commit, store):
    trainer = make_guarded()
    trainer.optimize(token(), 0, commit(0))
    report = trainer.optimize(token(), 0, commit(0))
    files = trainer.save(token(), "checkpoints/core/c0")
    for file in files:
        assert store.sha256(f"checkpoints/core/c0/{file.path}") == file.sha256
    restored = make_guarded()
    clock = PolicyClock(completed_steps=1, published_step=-1, next_rollout_id=1)
    restored.restore(token(), "checkpoints/core/c0", clock)
    assert (restored.policy_version, restored.next_update) == (1, 1)
    # idempotency survives the restore
    assert restored.optimize(token(attempt=5), 0, commit(0)) == report


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A root on an object store, and a cache of this test's own."""
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    return Store(f"memory://trainer-test/{tmp_path.name}")


def test_a_remote_root_is_saved_and_restored_by_copies(make_spec, model_dir, remote):
    trainer = GuardedTrainer(LocalTrainer(make_spec(), model_dir), remote)
    folder = "checkpoints/core/c0"
    files = trainer.save(token(), folder)
    assert {f.path for f in files} == set(remote.list(folder))
    assert all(remote.sha256(f"{folder}/{f.path}") == f.sha256 for f in files)
    clock = PolicyClock(completed_steps=0, published_step=-1, next_rollout_id=0)
    marker = CheckpointMarker(
        run_id="train/a", spec_sha256="0", epoch=1, clock=clock, cursor_sha256="0", files=files,
        created_unix=0.0,
    )  # fmt: skip
    remote.write_json(f"{folder}/{layout.COMPLETE}", marker.model_dump(mode="json"))
    trainer.restore(token(), folder, clock)
    assert trainer.next_update == 0
    data = remote.read_bytes(f"{folder}/{files[0].path}")
    remote.write_bytes(f"{folder}/{files[0].path}", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DigestMismatch, match=files[0].path):
        trainer.restore(token(), folder, clock)


def test_a_remote_export_is_whole_or_done_again(make_spec, model_dir, remote, monkeypatch):
    monkeypatch.setattr(guarded, "load_prompts", lambda _, split: [question()])
    trainer = GuardedTrainer(LocalTrainer(make_spec(), model_dir), remote)
    put = Store.put_file

    def broken(store, local, rel):
        if rel.endswith("model.safetensors"):
            raise ServiceUnreachable("broke off")
        put(store, local, rel)

    monkeypatch.setattr(Store, "put_file", broken)
    with pytest.raises(ServiceUnreachable):
        trainer.export(token(), "export-hf")
    assert not has_folder(remote, "export-hf")
    monkeypatch.setattr(Store, "put_file", put)
    report = trainer.export(token(attempt=2), "export-hf")
    assert has_folder(remote, "export-hf")
    assert remote.exists("export-hf/.complete")
    again = GuardedTrainer(LocalTrainer(make_spec(), model_dir), remote)
    proved = again.export(token(), "export-hf")
    assert proved.model_copy(update={"seconds": report.seconds}) == report
    remote.write_bytes("mine/notes.txt", b"not an export")
    with pytest.raises(ContractViolation, match="is not a finished export"):
        trainer.export(token(attempt=3), "mine")


class Killed(BaseException):
    """The process ended there."""


def test_an_upload_that_is_killed_while_it_clears_one_before_is_done_again(
    make_spec, model_dir, remote, monkeypatch
):
    """Objects go one by one in any order: the mark must not be among the first."""
    monkeypatch.setattr(guarded, "load_prompts", lambda _, split: [question()])
    for name in (".uploading", "config.json", "model.safetensors"):
        remote.write_bytes(f"export-hf/{name}", b"torn")

    def remove_first(store, path):
        first = sorted(store.find(path) or [path])[0]
        remove_all(store, [first])
        raise Killed

    remove_all = ObjectStore.remove_all
    trainer = GuardedTrainer(LocalTrainer(make_spec(), model_dir), remote)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "remove", remove_first)
        with pytest.raises(Killed):
            trainer.export(token(), "export-hf")
    assert len(remote.list("export-hf", hidden=True)) == 2
    trainer.export(token(attempt=2), "export-hf")
    assert has_folder(remote, "export-hf")


def test_final_export_answers_the_first_held_out_question(make_guarded, store, monkeypatch):
    monkeypatch.setattr(guarded, "load_prompts", lambda _, split: [question()])
    trainer = make_guarded()
    report = trainer.export(token(), "export-hf")
    assert report.question == "reverse abc="
    assert report.max_abs_logit_difference <= 1e-5
    assert store.exists("export-hf/.complete")
    assert trainer.export(token(attempt=2), "export-hf") == report


def test_exports_of_dead_processes_are_removed(make_guarded, store):
    dead = export_bases(store.root)[0] / "trainer-999999999"
    dead.mkdir(parents=True)
    (dead / "model.safetensors").write_bytes(b"left")
    make_guarded().export_weights(token(), 0)
    assert not dead.exists()


def test_small_shared_memory_is_passed_over(store):
    shared, temporary = export_bases(store.root)
    assert own_exports(store.root, 1).parent == shared
    assert own_exports(store.root, 1 << 60).parent == temporary


def test_a_repeated_update_adds_no_contract_event(make_guarded, commit, store):
    trainer = make_guarded(core={"publication_mode": "refresh"})
    trainer.optimize(token(), 0, commit(0))
    trainer.save(token(), "checkpoints/core/c0")
    trainer.optimize(token(attempt=2), 0, commit(0))
    trainer.optimize(token(1), 1, commit(1, seed=1))
    restored = make_guarded(core={"publication_mode": "refresh"})
    clock = PolicyClock(completed_steps=1, published_step=-1, next_rollout_id=1)
    restored.restore(token(1, attempt=2), "checkpoints/core/c0", clock)
    restored.optimize(token(1, attempt=3), 0, commit(0))

    def refreshes():
        rows = store.read_jsonl(layout.TRAINING_CONTRACT).rows
        return [row for row in rows if row["event"] == "refresh_scores"]

    assert [event["rollout_id"] for event in refreshes()] == [0, 1]
    # what a recovery trains again is measured again
    restored.optimize(token(1, attempt=4), 1, commit(1, seed=1))
    events = refreshes()
    assert [event["rollout_id"] for event in events] == [0, 1, 1]
    assert events[1] == events[2]


def test_a_save_keeps_nobody_waiting_who_only_looks(make_guarded, commit, monkeypatch):
    """Engines are loaded and sampled from while the state is written."""
    trainer = make_guarded()
    exported = trainer.export_weights(token(), 0)
    entered, release = threading.Event(), threading.Event()
    write = local.write_state

    def slow_write(*args):
        entered.set()
        assert release.wait(DEADLINE_S)
        return write(*args)

    monkeypatch.setattr(local, "write_state", slow_write)
    with ThreadPoolExecutor(2) as pool:
        saving = pool.submit(trainer.save, token(attempt=2), "checkpoints/core/c0")
        assert entered.wait(DEADLINE_S)
        assert trainer.exported() == exported
        assert (trainer.progress().stage, trainer.progress().detail) == ("save", "c0")
        assert (trainer.next_update, trainer.policy_version) == (0, 0)
        with pytest.raises(TimeoutError):  # no update in between: state and clock belong together
            pool.submit(trainer.optimize, token(attempt=3), 0, commit(0)).result(0.05)
        release.set()
        assert saving.result(DEADLINE_S)


@pytest.fixture
def sending(make_guarded):
    """A trainer whose engines take buckets: only then are weights offered."""

    def make() -> GuardedTrainer:
        return make_guarded(
            placement={"mode": "disaggregated"}, inference={"engine": "sglang", "dtype": "float32"}
        )

    return make


def test_offered_weights_are_written_as_an_export_writes_them(sending):
    trainer = sending()
    trainer.offer_weights(token(), 0)
    trainer.keep_offered(token(), 0)
    written = trainer.kept(0)
    assert written.on_disk
    assert trainer.exported() == written
    assert trainer.export_weights(token(), 0) == written
    names = ("config.json", "model.safetensors")
    content = [Path(written.path, name).read_bytes() for name in names]
    trainer.close()

    exported = sending().export_weights(token(), 0)
    assert exported == written
    assert [Path(exported.path, name).read_bytes() for name in names] == content


def test_an_offer_brings_the_only_bucket_and_packs_it_again_when_it_was_dropped(sending):
    trainer = sending()
    offer = trainer.offer_weights(token(), 0)
    assert offer.weights.num_buckets == 1
    assert offer.bucket == trainer.pack_bucket(token(), 0, 0)
    assert offer.bucket.num_bytes == offer.weights.num_bytes
    trainer.drop_bucket(token())
    again = trainer.offer_weights(token(), 0)
    assert again.weights == offer.weights
    assert again.bucket.tensors == offer.bucket.tensors


def test_the_folder_of_offered_weights_is_written_while_an_update_runs(
    sending, commit, monkeypatch
):
    trainer = sending()
    before = Path(trainer.export_weights(token(), 0).path, "model.safetensors").read_bytes()
    trainer.close()
    trainer = sending()
    trainer.offer_weights(token(), 0)
    trainer.keep_offered(token(), 0)
    entered, release = threading.Event(), threading.Event()
    optimize = LocalTrainer.optimize

    def slow_optimize(*args):
        report = optimize(*args)
        entered.set()
        assert release.wait(DEADLINE_S)
        return report

    monkeypatch.setattr(LocalTrainer, "optimize", slow_optimize)
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(trainer.optimize, token(), 0, commit(0))
        assert entered.wait(DEADLINE_S)
        written = trainer.kept(0)
        assert not updating.done()
        release.set()
        assert updating.result(DEADLINE_S).policy_version == 1
    assert Path(written.path, "model.safetensors").read_bytes() == before
    assert trainer.kept(0) == written
    assert trainer.kept(1) is None


def test_a_copy_is_not_overwritten_while_its_folder_is_written(sending, commit, monkeypatch):
    trainer = sending()
    trainer.offer_weights(token(), 0)
    trainer.keep_offered(token(), 0)
    entered, release = threading.Event(), threading.Event()
    write = host_copy.WeightsCopy.write

    def slow_write(*args):
        entered.set()
        assert release.wait(DEADLINE_S)
        return write(*args)

    monkeypatch.setattr(host_copy.WeightsCopy, "write", slow_write)
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(trainer.kept, 0)
        assert entered.wait(DEADLINE_S)
        trainer.optimize(token(), 0, commit(0))
        trainer.offer_weights(token(1), 1)
        keeping = pool.submit(trainer.keep_offered, token(1), 1)
        with pytest.raises(TimeoutError):
            keeping.result(0.05)
        release.set()
        written = writing.result(DEADLINE_S)
        keeping.result(DEADLINE_S)
    assert trainer.exported().version == 1  # which engines must serve; it is offered only
    newer = trainer.kept(1)
    contents = [Path(ref.path, "model.safetensors").read_bytes() for ref in (written, newer)]
    assert contents[0] != contents[1]


def test_weights_that_cannot_be_written_are_written_when_asked_again(sending, monkeypatch):
    trainer = sending()
    write = host_copy.write_model_folder

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(host_copy, "write_model_folder", full)
    trainer.offer_weights(token(), 0)
    trainer.keep_offered(token(), 0)
    with pytest.raises(StorageFull):
        trainer.kept(0)
    monkeypatch.setattr(host_copy, "write_model_folder", write)
    assert trainer.kept(0).on_disk


def test_only_what_was_offered_last_is_kept(sending):
    trainer = sending()
    with pytest.raises(ContractViolation, match="offered are none"):
        trainer.keep_offered(token(), 0)


def test_a_restore_drops_the_copy(sending):
    trainer = sending()
    trainer.save(token(), "checkpoints/core/c0")
    trainer.offer_weights(token(), 0)
    trainer.keep_offered(token(), 0)
    clock = PolicyClock(completed_steps=0, published_step=0, next_rollout_id=0)
    trainer.restore(token(attempt=2), "checkpoints/core/c0", clock)
    assert trainer.exported() is None
    assert trainer.kept(0) is None
