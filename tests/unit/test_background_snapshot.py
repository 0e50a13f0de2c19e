"""Snapshots: whole or not there, whatever a killed attempt left; and which of them are kept."""

from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.background.receipts import encoded
from activities.background.snapshot import _take, find_snapshot, prune_snapshots, snapshot
from activities.storage import layout
from activities.storage.lease import Owner, claim_epoch
from activities.storage.local_copy import put_folder
from activities.storage.store import Store
from models.background import EvaluationReceipt, SnapshotRef, SnapshotRequest
from models.errors import StaleFence, StorageFull, TrainerLost
from models.evaluation import ReceiptStatus
from models.ids import FenceToken, RunRef
from models.run import PrepareRequest
from tests.support.fake_fleet import FakeFleet, site_of


class Rig:
    """A fake trainer at some version over a claimed root."""

    def __init__(self, root: Path) -> None:
        self.store, self.fleet = Store(root), FakeFleet()
        self.run = RunRef(run_id="train/rig", root=str(root), spec_sha256="0" * 64)
        self.owner = Owner(run_id="train/rig", namespace="default", cluster_id="test")
        self.epoch = claim_epoch(self.store, self.owner)

    async def take(self, update: int, version: int | None = None, attempt: int = 1) -> SnapshotRef:
        self.fleet.live_trainer.policy_version = update if version is None else version
        request = SnapshotRequest(
            run=self.run,
            epoch=self.epoch,
            update=update,
            policy_version=self.fleet.live_trainer.policy_version,
        )
        token = FenceToken(epoch=self.epoch, update=update, attempt=4000 + attempt)
        taken: SnapshotRef = await ActivityEnvironment().run(
            snapshot, site_of(self.fleet), request, token
        )
        return taken

    def receipt(self, update: int, name: str = "0" * 16, **fields: Any) -> None:
        receipt = EvaluationReceipt(update=update, **fields)
        self.store.write_bytes(layout.eval_receipt(update, name), encoded(receipt))

    def content(self, update: int) -> bytes:
        return self.store.read_bytes(f"{layout.eval_snapshot(update)}/model.safetensors")


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    made = Rig(tmp_path)
    token = FenceToken(epoch=made.epoch, update=0, attempt=1)
    await made.fleet.prepare(token, PrepareRequest(run=made.run, epoch=made.epoch))
    return made


async def test_a_snapshot_is_the_export_and_its_facts(rig: Rig) -> None:
    taken = await rig.take(4)
    exported = await rig.fleet.live_trainer.exported()
    assert exported is not None
    assert (taken.update, taken.policy_version, taken.digest) == (4, 4, exported.digest)
    assert taken.folder == "eval-snapshots/update-00000004/hf"
    assert rig.content(4) == b"4"
    assert rig.store.read_bytes(f"{taken.folder}/.complete") == b""
    assert find_snapshot(rig.store, 4) == taken
    assert find_snapshot(rig.store, 2) is None


async def test_a_folder_without_its_marker_is_moved_aside(rig: Rig) -> None:
    rig.store.write_bytes("eval-snapshots/update-00000004/hf/model.safetensors", b"half")
    rig.store.write_bytes("eval-snapshots/update-00000004/.hf-dead/model.safetensors", b"ha")
    await rig.take(4)
    names = rig.store.list("eval-snapshots/update-00000004", hidden=True)
    assert rig.content(4) == b"4"
    (aside,) = (name for name in names if name.startswith("hf.incomplete-"))
    assert rig.store.list(f"eval-snapshots/update-00000004/{aside}") == ["model.safetensors"]
    assert sorted(names) == sorted(["hf", aside])


async def test_an_attempt_that_dies_while_copying_blocks_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file = Store.put_file

    def full(self: Store, local: Path, rel: str) -> None:
        put_file(self, local, rel)
        raise StorageFull("no space left")

    monkeypatch.setattr(Store, "put_file", full)
    with pytest.raises(StorageFull):
        await rig.take(4)
    assert find_snapshot(rig.store, 4) is None
    monkeypatch.setattr(Store, "put_file", put_file)
    await rig.take(4, attempt=2)
    assert rig.content(4) == b"4"
    assert rig.store.list("eval-snapshots/update-00000004", hidden=True) == ["hf"]


async def test_a_complete_snapshot_stays_when_its_update_is_redone(rig: Rig) -> None:
    """An evaluation may be reading it: its receipt names its digest."""
    first = await rig.take(4, version=4)
    rig.receipt(4, status=ReceiptStatus.PENDING, snapshot=first)
    again = await rig.take(4, version=3, attempt=2)
    assert again == first
    assert rig.content(4) == b"4"


async def test_a_snapshot_of_undone_updates_that_no_receipt_names_is_replaced(rig: Rig) -> None:
    """Taken, and the trainer lost before the claim: update 4 is now another one's."""
    first = await rig.take(4, version=4)
    rig.receipt(4, status=ReceiptStatus.CLAIMED)  # claimed, never filled
    again = await rig.take(4, version=3, attempt=2)
    assert again.digest != first.digest
    assert (again.policy_version, rig.content(4)) == (3, b"3")
    assert find_snapshot(rig.store, 4) == again
    assert rig.store.list("eval-snapshots/update-00000004", hidden=True) == ["hf"]


async def test_the_initial_weights_are_referred_to(rig: Rig) -> None:
    taken = await rig.take(0)
    assert taken.folder == "prepared/hf"
    reference = rig.store.read_json("eval-snapshots/update-00000000/reference.json")
    assert reference["checkpoint"] == f"{rig.store.root}/prepared/hf"
    assert (reference["update"], reference["reuse_initial_hf"]) == (0, True)
    assert not rig.store.exists("eval-snapshots/update-00000000/hf")
    assert await rig.take(0, attempt=2) == taken


async def test_an_older_epoch_stores_nothing(rig: Rig) -> None:
    claim_epoch(rig.store, rig.owner)
    with pytest.raises(StaleFence):
        await rig.take(4)
    assert rig.store.list("eval-snapshots") == []


async def test_a_dead_trainer_is_told(rig: Rig) -> None:
    rig.fleet.script.fail("export_weights 4", TrainerLost("killed"))
    with pytest.raises(TrainerLost):
        await rig.take(4)


async def test_what_nobody_needs_is_deleted(rig: Rig) -> None:
    """Kept: open ones, failed ones, those without a receipt, the newest, the reference."""
    complete = {"status": "complete", "folder": "x", "reward": 0.5}
    failed = {"status": "failed", "folder": "x", "error": "x"}
    rig.receipt(0, status=ReceiptStatus.SUBMITTED, result=complete)
    rig.receipt(2, status=ReceiptStatus.SUBMITTED, result=complete)
    rig.receipt(4, status=ReceiptStatus.SKIPPED_BUSY)
    rig.receipt(6, status=ReceiptStatus.SUBMITTED)
    rig.receipt(8, status=ReceiptStatus.SUBMITTED, result=failed)
    rig.receipt(10, status=ReceiptStatus.SUBMISSION_FAILED)
    rig.receipt(12, status=ReceiptStatus.SUBMITTED, result=failed)
    rig.receipt(12, "0" * 16 + "-manual-" + "1" * 16, status=ReceiptStatus.SUBMITTED)
    rig.receipt(14, status=ReceiptStatus.SUBMITTED, result=failed)
    rig.receipt(
        14, "0" * 16 + "-manual-" + "1" * 16, status=ReceiptStatus.SUBMITTED, result=complete
    )
    rig.receipt(18, status=ReceiptStatus.SUBMITTED, result=complete)
    await rig.take(0)
    for update in range(2, 20, 2):
        rig.store.write_bytes(f"{layout.eval_snapshot(update)}/.complete", b"")
    assert prune_snapshots(rig.store) == [layout.eval_snapshot(update) for update in (2, 4, 14)]
    left = [int(name[-8:]) for name in rig.store.list("eval-snapshots")]
    assert left == [0, 6, 8, 10, 12, 16, 18]
    assert prune_snapshots(rig.store) == []


async def test_what_cannot_be_deleted_is_only_a_warning(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.receipt(2, status=ReceiptStatus.SKIPPED_BUSY)
    for update in (2, 4):
        rig.store.write_bytes(f"{layout.eval_snapshot(update)}/.complete", b"")

    def refuse(self: Store, rel: str) -> None:
        raise PermissionError(rel)

    monkeypatch.setattr(Store, "remove_tree", refuse)
    assert prune_snapshots(rig.store) == []


async def test_an_upload_of_who_was_overtaken_meanwhile_does_not_count(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = Store(f"memory://bucket/{tmp_path.name}")
    token = FenceToken(epoch=claim_epoch(far, rig.owner), update=2, attempt=4001)
    weights = await rig.fleet.live_trainer.export_weights(token, 0)

    def overtaken(store: Store, local: Path, rel: str) -> None:
        put_folder(store, local, rel)
        claim_epoch(store, rig.owner)

    monkeypatch.setattr("activities.background.snapshot.put_folder", overtaken)
    with pytest.raises(StaleFence):
        _take(far, 2, weights, token)
    assert find_snapshot(far, 2) is None
