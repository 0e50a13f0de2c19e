"""Where a rebuilt producer begins, and what survives in the fleet's record. No cluster needed."""

from pathlib import Path

import pytest

from activities.storage import layout
from activities.storage.commit import commit_checkpoint
from activities.storage.lease import Owner, claim_epoch
from activities.storage.store import Store
from models.checkpoint import CheckpointRef, PolicyClock
from models.errors import ConfigurationError, ContractViolation
from models.ids import FenceToken, RunRef
from models.ports import ActorStatus
from models.prompt import DataState
from models.rollout import CollectionCounts, CollectionManifest, RolloutCollection
from models.run import PrepareRequest
from workers.actors.order import (
    ActorFacts,
    ActorOrder,
    actor_name,
    engine_threads,
    parse_actor_name,
    require_same_code,
    trainer_threads,
)
from workers.fleet.folders import export_folders
from workers.fleet.preparing import data_position
from workers.fleet.record import FLEET_JSON, FleetRecord


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def reference(store: Store) -> RunRef:
    return RunRef(run_id="train/position", root=store.root, spec_sha256="5" * 64)


def request(store: Store, checkpoint: CheckpointRef | None = None) -> PrepareRequest:
    return PrepareRequest(run=reference(store), epoch=9, checkpoint=checkpoint, next_update=3)


def write_manifest(store: Store, update: int, epoch: int, sha256: str, offset: int) -> None:
    collection = RolloutCollection(
        update=update,
        epoch=epoch,
        uri=layout.collection_parquet(update, epoch),
        sha256=sha256,
        counts=CollectionCounts(groups=1, samples=1, prompt_tokens=1, response_tokens=1),
        reward_mean=0.0,
        min_version=0,
        max_version=0,
        seconds=0.0,
    )
    manifest = CollectionManifest(collection=collection, data_after=DataState(sample_offset=offset))
    store.write_json(layout.collection_manifest(update, epoch), manifest.model_dump(mode="json"))


def facts(store: Store, next_update: int, sha256: str | None, code: str = "x") -> ActorFacts:
    status = ActorStatus(role="trainer", rank=0, pid=1, host="h", incarnation=0, code_digest=code)
    return ActorFacts(
        order=ActorOrder(run=reference(store), role="trainer", scratch="/nowhere"),
        actor_pid=1,
        status=status,
        serving=True,
        next_update=next_update,
        last_batch_sha256=sha256,
    )


def checkpoint_after(store: Store, update: int, offset: int) -> CheckpointRef:
    owner = Owner(run_id="train/position", namespace="n", cluster_id="c")
    token = FenceToken(epoch=claim_epoch(store, owner), update=update + 1, attempt=1)
    clock = PolicyClock(
        completed_steps=update + 1, published_step=update, next_rollout_id=update + 1
    )
    folder = layout.checkpoint_folder(update, token)
    cursor = DataState(sample_offset=offset)
    return commit_checkpoint(store, reference(store), token, clock, cursor, (), folder)


def test_a_fresh_run_begins_at_the_start(store: Store):
    assert data_position(store, request(store), None) == DataState()
    assert data_position(store, request(store), facts(store, 0, None)) == DataState()


def test_a_restored_trainer_takes_the_data_back_to_its_checkpoint(store: Store):
    write_manifest(store, 2, 1, "a", offset=30)
    checkpoint = checkpoint_after(store, 1, offset=20)

    assert data_position(store, request(store, checkpoint), None).sample_offset == 20


def test_a_kept_trainer_decides_which_collection_counts(store: Store):
    """A newer epoch collected the same update again; the trainer had trained the older one."""
    write_manifest(store, 2, 1, "trained", offset=30)
    write_manifest(store, 2, 2, "abandoned", offset=31)
    write_manifest(store, 3, 2, "later", offset=40)

    assert data_position(store, request(store), facts(store, 3, "trained")).sample_offset == 30


def test_the_cursor_stands_in_for_a_manifest_that_is_gone(store: Store):
    checkpoint = checkpoint_after(store, 2, offset=30)

    assert (
        data_position(store, request(store, checkpoint), facts(store, 3, "t")).sample_offset == 30
    )


def test_a_trained_collection_without_a_manifest_is_refused(store: Store):
    write_manifest(store, 2, 1, "other", offset=30)

    with pytest.raises(ContractViolation, match=r"collection trained as update 2.*1 others"):
        data_position(store, request(store), facts(store, 3, "trained"))


def test_incarnations_go_on_after_every_process_is_gone(store: Store):
    record = FleetRecord(store)
    assert record.rows() == ()
    assert record.next_incarnation("engine", 1) == 0
    for role, rank, incarnation in (("trainer", 0, 0), ("engine", 1, 0), ("engine", 1, 1)):
        record.write(ActorStatus(role=role, rank=rank, pid=7, host="h", incarnation=incarnation))

    again = FleetRecord(store)

    assert [(row.role, row.rank, row.incarnation) for row in again.rows()] == [
        ("engine", 1, 1),
        ("trainer", 0, 0),
    ]
    assert again.next_incarnation("engine", 1) == 2
    assert again.next_incarnation("engine", 0) == 0
    assert isinstance(store.read_json(FLEET_JSON), list)


def test_another_writer_is_seen_after_a_refresh(store: Store):
    record, other = FleetRecord(store), FleetRecord(store)
    assert record.rows() == ()
    other.write(ActorStatus(role="trainer", rank=0, pid=7, host="h", incarnation=4))

    record.refresh()

    assert record.next_incarnation("trainer", 0) == 5


def test_names_of_actors_can_be_read_back():
    for role, rank in (("trainer", 0), ("producer", 0), ("engine", 0), ("engine", 12)):
        assert parse_actor_name(actor_name(role, rank)) == (role, rank)
    for foreign in ("", "engine", "engine-", "engine-x", "engine--1", "judge-0", "trainer-0"):
        assert parse_actor_name(foreign) is None


def test_other_code_is_refused_naming_both_digests(store: Store):
    require_same_code(facts(store, 0, None, code="1+aaaa"), "1+aaaa")
    with pytest.raises(ConfigurationError, match=r"runs code 1\+bbbb, this worker runs 1\+aaaa"):
        require_same_code(facts(store, 0, None, code="1+bbbb"), "1+aaaa")


@pytest.mark.parametrize(
    ("lag", "engines", "cores", "trainer", "engine"),
    [(0, 1, 8, 8, 8), (0, 2, 8, 8, 4), (1, 2, 8, 4, 2), (1, 1, 1, 1, 1), (0, 4, 2, 2, 1)],
)
def test_cores_are_shared_when_sampling_overlaps_training(
    tmp_path: Path, lag: int, engines: int, cores: int, trainer: int, engine: int
):
    from fleet_rig import Run

    run = Run(tmp_path, "threads", core={"max_policy_lag": lag}, inference={"num_engines": engines})

    assert trainer_threads(run.spec, cores) == trainer
    section = run.spec.trainer.model_copy(update={"num_processes": 4})
    shared = run.spec.model_copy(update={"trainer": section})
    assert trainer_threads(shared, cores) == max(1, trainer // 4)
    assert engine_threads(run.spec, cores) == engine


def test_exports_are_removed_where_trainers_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from workers.trainers.weights import export_bases

    assert export_folders(str(tmp_path)) == export_bases(str(tmp_path))
    monkeypatch.setenv("PERDURE_EXPORT_DIR", str(tmp_path / "shared"))
    assert export_folders(str(tmp_path)) == export_bases(str(tmp_path))
    assert {folder.parent for folder in export_bases(str(tmp_path))} == {tmp_path / "shared"}
