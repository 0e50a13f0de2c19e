"""The trainer actor without Ray: one trainer, however often it is asked to start."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from fleet_rig import tiny_document

from activities.rollout.collection_file import write_collection
from activities.storage import layout
from activities.storage.store import Store
from configs.load import resolve_document
from models.errors import ContractViolation
from models.ids import FenceToken, RunRef
from models.rollout import CollectionCounts, RolloutCollection
from workers.actors import trainer
from workers.actors.order import ActorOrder
from workers.actors.trainer import TrainerActor
from workers.trainers import gang, process_ranks
from workers.trainers.weights import export_bases


@pytest.fixture
def make_actor(tmp_path, model_dir, monkeypatch):
    """An actor of a run of two groups of four samples, whose model is prepared."""
    root = tmp_path / "root"
    monkeypatch.setattr(trainer, "enter", lambda *_: None)  # torch is imported long since

    def make(**section: Any) -> TrainerActor:
        batch = {"rollout_batch_size": 2, "samples_per_prompt": 4}
        document = tiny_document(root, "actor", training=batch, trainer=section)
        loaded = resolve_document(document, origin="test")
        store = Store(root)
        store.write_json(layout.RESOLVED_CONFIG, loaded.document)
        shutil.copytree(model_dir, store.local_path(layout.PREPARED_MODEL))
        run = RunRef(run_id="train/actor", root=str(root), spec_sha256=loaded.sha256)
        return TrainerActor(ActorOrder(run=run, role="trainer", scratch=str(tmp_path / "scratch")))

    yield make
    for base in export_bases(str(root)):
        shutil.rmtree(base, ignore_errors=True)


def collection(root: Path, groups: list[Any]) -> RolloutCollection:
    uri = "rollouts/0.parquet"
    return RolloutCollection(
        update=0,
        epoch=1,
        uri=uri,
        sha256=write_collection(Store(root), uri, groups),
        counts=CollectionCounts(groups=2, samples=8, prompt_tokens=8, response_tokens=36),
        reward_mean=0.5,
        min_version=0,
        max_version=0,
        seconds=1.0,
    )


def test_a_start_that_is_repeated_keeps_the_trainer_as_it_is(
    make_actor, make_groups, tmp_path, monkeypatch
):
    """A call whose fate is unknown, after a broken connection, is made again."""
    frozen = []
    monkeypatch.setattr(trainer, "freeze_living_objects", lambda: frozen.append(True))
    actor = make_actor(num_threads=1)
    assert not actor.facts().serving
    assert actor.start(2, None, None).next_update == 0
    token = FenceToken(epoch=2, update=0, attempt=1)
    report = actor.optimize(token, 0, collection(tmp_path / "root", make_groups()))
    again = actor.start(2, None, None)
    assert again.serving
    assert (again.next_update, again.last_batch_sha256) == (1, report.batch_sha256)
    assert again.status.policy_version == report.policy_version == 1
    with pytest.raises(ContractViolation, match=r"was started with .* \(2, None, None\)"):
        actor.start(1, None, None)
    assert actor.facts().next_update == 1
    assert frozen == [True]
    actor.close()


def test_ranks_that_do_not_meet_are_ended(make_actor, monkeypatch):
    closed = []

    class Others:
        pids = ()

        def close(self) -> None:
            closed.append(True)

    def miss(*_: object) -> None:
        raise RuntimeError("wait timeout")

    monkeypatch.setattr(gang.Gang, "start", lambda *_: Others())
    monkeypatch.setattr(process_ranks, "join_ranks", miss)
    actor = make_actor(num_processes=2)
    with pytest.raises(RuntimeError, match="wait timeout"):
        actor.start(1, None, None)
    assert closed == [True]
    assert actor._guarded is None
