"""The trainer of ``docs/extending.md``, behind the same guard as the local one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from documents import ROOT, blocks

from activities.rollout.collection_file import write_collection
from activities.storage.store import Store
from models.checkpoint import PolicyClock
from models.errors import ContractViolation, StaleFence
from models.ids import FenceToken
from models.rollout import CollectionCounts, RolloutCollection
from workers.trainers.guarded import GuardedTrainer


@pytest.fixture
def made(make_spec: Any, model_dir: Path) -> Any:
    names: dict[str, Any] = {"__name__": "documented"}
    block = blocks(ROOT / "docs" / "extending.md", "python")[3]
    exec(compile(block, "extending.md block 3", "exec"), names)
    return names["IdleTrainer"](make_spec(), model_dir)


def collection(store: Store, groups: Any, update: int) -> RolloutCollection:
    uri = f"rollouts/{update}.parquet"
    return RolloutCollection(
        update=update,
        epoch=1,
        uri=uri,
        sha256=write_collection(store, uri, groups),
        counts=CollectionCounts(groups=2, samples=8, prompt_tokens=8, response_tokens=36),
        reward_mean=0.5,
        min_version=0,
        max_version=0,
        seconds=1.0,
    )


def test_it_counts_updates_once_and_changes_nothing(
    made: Any, make_groups: Any, tmp_path: Path
) -> None:
    store = Store(tmp_path / "root")
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    trainer = GuardedTrainer(made, store)
    first = collection(store, make_groups(), 0)
    report = trainer.optimize(FenceToken(epoch=1, update=0, attempt=2), 0, first)
    assert trainer.optimize(FenceToken(epoch=1, update=0, attempt=3), 0, first) == report
    assert (trainer.next_update, trainer.policy_version, report.optimizer_steps) == (1, 0, 0)
    with pytest.raises(StaleFence):
        trainer.optimize(FenceToken(epoch=1, update=0, attempt=1), 0, first)
    with pytest.raises(ContractViolation, match="with the collection of update 0"):
        trainer.optimize(FenceToken(epoch=1, update=1, attempt=1), 1, first)
    assert all(torch.equal(before[name], value) for name, value in made.model.state_dict().items())


def test_it_goes_on_where_it_was_saved(made: Any, make_groups: Any, tmp_path: Path) -> None:
    made.optimize(0, "a" * 64, make_groups())
    made.save(tmp_path / "saved")
    made.next_update = 7
    made.load(
        tmp_path / "saved", PolicyClock(completed_steps=0, published_step=-1, next_rollout_id=1)
    )
    assert made.next_update == 1
    with pytest.raises(ContractViolation, match="the next is 1"):
        made.optimize(0, "a" * 64, make_groups())
