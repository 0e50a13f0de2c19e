"""Epoch leases: exclusive epochs, refusal of other runs, take-over, revocation."""

import multiprocessing
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from activities.storage import lease
from activities.storage.lease import Owner, claim_epoch, current_epoch, epoch_claim, read_owner
from activities.storage.store import Store
from models.errors import ContractViolation, OwnershipError, StaleFence

OWNER = Owner(
    run_id="train/a",
    namespace="default",
    cluster_id="c-1",
    workflow_run_id="w-1",
    host="alpha",
    pid=41,
    address="127.0.0.1:7233",
)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store(tmp_path / "root")
    return Store(f"memory://{uuid.uuid4().hex}/root")


def test_unclaimed_root(store: Store) -> None:
    assert current_epoch(store) == 0
    assert read_owner(store) is None
    assert not lease.is_revoked(store, 1)
    lease.require_epoch(store, 0)


def test_the_same_run_claims_again_with_a_higher_epoch(store: Store) -> None:
    restarted = OWNER.model_copy(update={"pid": 99, "host": "beta", "workflow_run_id": "w-2"})
    assert claim_epoch(store, OWNER) == 1
    assert claim_epoch(store, restarted) == 2
    assert current_epoch(store) == 2
    assert epoch_claim(store, 1).owner == OWNER
    assert epoch_claim(store, 2).owner == restarted
    owner = read_owner(store)
    assert owner is not None
    assert owner.owner.run_id == "train/a"


@pytest.mark.parametrize(
    "other", [{"run_id": "train/b"}, {"cluster_id": "c-2"}, {"namespace": "prod"}]
)
def test_another_run_or_server_is_refused_and_told_who_owns_it(
    store: Store, other: dict[str, Any]
) -> None:
    claim_epoch(store, OWNER)
    intruder = OWNER.model_copy(update={**other, "host": "beta", "pid": 7})
    with pytest.raises(OwnershipError) as refusal:
        claim_epoch(store, intruder)
    message = str(refusal.value)
    for fact in ("train/a", "alpha", "41", "UTC", "c-1", "127.0.0.1:7233", "default"):
        assert fact in message
    assert "another output.root" in message
    assert "--take-over" in message
    assert current_epoch(store) == 1


def test_take_over_adopts_and_shuts_the_old_owner_out(store: Store) -> None:
    claim_epoch(store, OWNER)
    heir = OWNER.model_copy(update={"cluster_id": "c-2"})
    assert claim_epoch(store, heir, take_over=True) == 2
    with pytest.raises(OwnershipError):
        claim_epoch(store, OWNER)
    with pytest.raises(StaleFence, match="epoch 2 owns"):
        lease.require_epoch(store, 1)
    assert claim_epoch(store, heir) == 3


def test_a_take_over_during_a_claim_wins(tmp_path: Path) -> None:
    heir = OWNER.model_copy(update={"cluster_id": "c-2"})

    taken: list[int] = []

    class Overtaken(Store):
        def create_exclusive(self, rel: str, data: bytes) -> bool:
            if "epoch-" in rel and not taken:
                taken.append(claim_epoch(Store(tmp_path), heir, take_over=True))
            return super().create_exclusive(rel, data)

    with pytest.raises(OwnershipError, match="c-2"):
        claim_epoch(Overtaken(tmp_path), OWNER)
    assert taken == [1]
    lease.require_epoch(Store(tmp_path), 1)


def test_threads_get_different_epochs(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        epochs = list(pool.map(lambda _: claim_epoch(store, OWNER), range(24)))
    assert sorted(epochs) == list(range(1, 25))


def _claim(root: str, answers: Any) -> None:
    answers.put([claim_epoch(Store(root), OWNER) for _ in range(5)])


def test_processes_get_different_epochs(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    claimers = [context.Process(target=_claim, args=(str(tmp_path), answers)) for _ in range(3)]
    for claimer in claimers:
        claimer.start()
    epochs = [epoch for _ in claimers for epoch in answers.get(timeout=40)]
    for claimer in claimers:
        claimer.join(10)
    assert sorted(epochs) == list(range(1, 16))


def test_two_runs_racing_for_a_fresh_root_leave_one_owner(store: Store) -> None:
    def attempt(number: int) -> int | None:
        try:
            return claim_epoch(store, OWNER.model_copy(update={"run_id": f"train/{number}"}))
        except OwnershipError:
            return None

    with ThreadPoolExecutor(8) as pool:
        epochs = list(pool.map(attempt, range(8)))
    assert len([epoch for epoch in epochs if epoch is not None]) == 1


def test_revocation_covers_lower_epochs_only(store: Store) -> None:
    for _ in range(3):
        claim_epoch(store, OWNER)
    lease.revoke_epoch(store, 2)
    lease.revoke_epoch(store, 2)
    assert [lease.is_revoked(store, epoch) for epoch in (1, 2, 3)] == [True, True, False]
    lease.require_epoch(store, 3)
    lease.revoke_epoch(store, 3)
    with pytest.raises(StaleFence, match="epoch 3 is revoked"):
        lease.require_epoch(store, 3)
    assert claim_epoch(store, OWNER) == 4
    lease.require_epoch(store, 4)


def test_a_damaged_owner_file_is_named(store: Store) -> None:
    store.write_bytes("lease/owner.json", b"{}")
    with pytest.raises(ContractViolation, match=r"lease/owner\.json"):
        claim_epoch(store, OWNER)
