"""Receipts: claimed once, taken up after a death, skipped beside a running evaluation."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from activities.background import submit
from activities.background.receipts import (
    encoded,
    evaluation_key,
    evaluation_tasks,
    key_of,
    read_receipt,
    receipts,
)
from activities.storage import layout
from activities.storage.lease import Owner, claim_epoch, revoke_epoch
from activities.storage.store import Store
from configs.load import resolve_document
from models.background import EvaluationReceipt, SnapshotRef, SubmissionRecord, SubmitRequest
from models.errors import ContractViolation, ServiceUnreachable, StaleFence
from models.evaluation import EvaluationSubmission, ReceiptStatus
from models.ids import RunRef
from workers.cli.receipts import prepare_resubmission


class FakeExperiments:
    """Temporal's view: workflow id -> whether it runs; unknown ids were never started."""

    def __init__(self) -> None:
        self.known: dict[str, bool] = {}
        self.failure: Exception | None = None

    async def is_open(self, experiment_id: str) -> bool | None:
        if self.failure is not None:
            raise self.failure
        return self.known.get(experiment_id)

    async def closed(self, experiment_id: str) -> None:
        raise AssertionError("nobody waits in these tests")


class Desk:
    """A claimed root and a submitter."""

    def __init__(self, root: Path, **evaluation: Any) -> None:
        document = {
            "schema_version": 1,
            "name": "desk",
            "model": {"source": "tiny", "tiny": {}},
            "data": {"tasks": [{"task": "reverse_word", "train_count": 8, "eval_count": 2}]},
            "output": {"root": str(root)},
            "training": {"num_rollouts": 6},
            "evaluation": {"mode": "background", "interval": 2, **evaluation},
        }
        loaded = resolve_document(document, origin="test")
        self.spec, self.store = loaded.spec, Store(root)
        self.store.write_json(layout.RESOLVED_CONFIG, loaded.document)
        self.run = RunRef(run_id="train/desk", root=str(root), spec_sha256=loaded.sha256)
        self.owner = Owner(run_id="train/desk", namespace="default", cluster_id="test")
        self.epoch = claim_epoch(self.store, self.owner)
        self.experiments = FakeExperiments()

    async def submit(self, update: int, phase: str = "periodic", epoch: int | None = None) -> Any:
        request = SubmitRequest(
            run=self.run,
            epoch=epoch or self.epoch,
            phase=phase,
            snapshot=SnapshotRef(
                update=update,
                policy_version=update,
                folder=layout.eval_snapshot(update),
                digest="d" * 64,
                num_bytes=1,
            ),
        )
        return await submit.submit_evaluation(request, self.experiments, "code", 1.0)

    def receipt(self, update: int) -> EvaluationReceipt:
        return {each.update: each for _, each in receipts(self.store)}[update]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_the_key_is_the_digest_of_the_settings(tmp_path: Path) -> None:
    one, same, other = (
        Desk(tmp_path / name, temperature=temperature)
        for name, temperature in (("a", 0.0), ("b", 0.0), ("c", 1.0))
    )
    tasks = evaluation_tasks(one.spec)
    text = json.dumps(tasks, sort_keys=True, separators=(",", ":"))
    assert evaluation_key(tasks) == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert evaluation_key(evaluation_tasks(same.spec)) == evaluation_key(tasks)
    assert evaluation_key(evaluation_tasks(other.spec)) != evaluation_key(tasks)
    (task,) = tasks
    assert (task["task"], task["interval"]) == ("heldout", 2)
    assert task["generation"]["temperature"] == 0.0


async def test_a_claim_says_all_that_an_evaluation_needs(desk: Desk) -> None:
    claim = await desk.submit(4)
    receipt = desk.receipt(4)
    assert claim.submission.status is receipt.status is ReceiptStatus.PENDING
    assert claim.order is not None
    assert claim.order.experiment_id == receipt.experiment_id
    key = evaluation_key(evaluation_tasks(desk.spec))
    assert claim.order.receipt == f"evaluation/update-00000004-{key}.json"
    assert receipt.experiment_id.startswith(f"train/desk/evaluation/update-00000004-{key}.")
    assert receipt.group_id == key == key_of(claim.order.receipt)
    assert receipt.checkpoint == f"{desk.store.root}/eval-snapshots/update-00000004/hf"
    assert (receipt.code_sha256, receipt.phase) == ("code", "periodic")
    assert receipt.evaluation["interval"] == 2
    assert claim.order.timeout_s == desk.spec.evaluation.timeout_s


async def test_of_many_claimants_one_creates_and_all_mean_one_workflow(desk: Desk) -> None:
    claims = await asyncio.gather(*(desk.submit(2) for _ in range(5)))
    assert {claim.submission.experiment_id for claim in claims} == {desk.receipt(2).experiment_id}


@pytest.mark.parametrize(
    "status",
    [ReceiptStatus.SUBMITTED, ReceiptStatus.SUBMISSION_FAILED, ReceiptStatus.SKIPPED_BUSY],
)
async def test_a_settled_receipt_is_never_submitted_again(
    desk: Desk, status: ReceiptStatus
) -> None:
    first = await desk.submit(2)
    rel = first.submission.receipt
    desk.store.write_bytes(
        rel, encoded(read_receipt(desk.store, rel).model_copy(update={"status": status}))
    )
    before = desk.store.read_bytes(rel)
    again = await desk.submit(2)
    assert again.order is None
    assert again.submission.status is status
    assert desk.store.read_bytes(rel) == before


@pytest.mark.parametrize("status", [ReceiptStatus.CLAIMED, ReceiptStatus.PENDING])
async def test_a_death_between_claim_and_start_is_taken_up(
    desk: Desk, status: ReceiptStatus
) -> None:
    """Nothing runs under the id that the receipt fixed, so it is started now, once."""
    key = evaluation_key(evaluation_tasks(desk.spec))
    rel = layout.eval_receipt(2, key)
    left = EvaluationReceipt(update=2, status=status, experiment_id="train/desk/evaluation/left")
    desk.store.write_bytes(rel, encoded(left))
    claim = await desk.submit(2)
    assert claim.order is not None
    assert claim.order.experiment_id == "train/desk/evaluation/left"


@pytest.mark.parametrize("runs", [True, False])
async def test_a_death_between_start_and_record_is_noticed(desk: Desk, runs: bool) -> None:
    first = await desk.submit(2)
    desk.experiments.known[first.submission.experiment_id] = runs
    claim = await desk.submit(2)
    assert claim.order is None
    assert claim.submission.status is desk.receipt(2).status is ReceiptStatus.SUBMITTED


async def test_busy_skips_all_but_the_final_one(desk: Desk) -> None:
    first = await desk.submit(2)
    desk.experiments.known[first.submission.experiment_id] = True
    skipped = await desk.submit(4)
    assert skipped.order is None
    assert desk.receipt(4).status is ReceiptStatus.SKIPPED_BUSY
    final = await desk.submit(6, "final")
    assert final.order is not None
    assert final.order.after == first.submission.experiment_id
    desk.experiments.known[first.submission.experiment_id] = False
    free = await desk.submit(8)
    assert free.order is not None
    assert free.order.after is None


async def test_an_older_epoch_claims_nothing(desk: Desk) -> None:
    claim_epoch(desk.store, desk.owner)
    with pytest.raises(StaleFence, match="epoch 2 owns"):
        await desk.submit(2)
    revoke_epoch(desk.store, 2)
    with pytest.raises(StaleFence, match="revoked"):
        await desk.submit(2, epoch=2)
    assert list(receipts(desk.store)) == []


async def test_failures_are_recorded_with_and_without_a_claim(desk: Desk) -> None:
    failed = EvaluationSubmission(
        update=2,
        phase="periodic",
        status=ReceiptStatus.SUBMISSION_FAILED,
        error_type="StorageFull",
        error="no space",
    )
    await submit.record_submission(SubmissionRecord(run=desk.run, submission=failed), "code")
    assert desk.receipt(2).status is ReceiptStatus.SUBMISSION_FAILED
    assert desk.receipt(2).error == {"type": "StorageFull", "message": "no space"}
    claim = await desk.submit(4)
    started = claim.submission.model_copy(update={"status": ReceiptStatus.SUBMITTED})
    await submit.record_submission(SubmissionRecord(run=desk.run, submission=started), "code")
    late = failed.model_copy(update={"update": 4, "receipt": claim.submission.receipt})
    await submit.record_submission(SubmissionRecord(run=desk.run, submission=late), "code")
    assert desk.receipt(4).status is ReceiptStatus.SUBMITTED
    assert desk.receipt(4).error is None


async def test_a_submission_that_failed_after_its_snapshot_names_it(desk: Desk) -> None:
    """The snapshot is stored; a receipt that did not name it could never be submitted again."""
    snapshot = SnapshotRef(
        update=2, policy_version=2, folder=layout.eval_snapshot(2), digest="d" * 64, num_bytes=1
    )
    desk.experiments.failure = ServiceUnreachable("Temporal does not answer")
    desk.experiments.known["before"] = True
    desk.store.write_bytes(
        layout.eval_receipt(0, "0" * 16),
        encoded(
            EvaluationReceipt(update=0, status=ReceiptStatus.SUBMITTED, experiment_id="before")
        ),
    )
    with pytest.raises(ServiceUnreachable):
        await desk.submit(2)
    claimed = desk.receipt(2)
    assert (claimed.status, claimed.snapshot) == (ReceiptStatus.CLAIMED, None)
    failed = EvaluationSubmission(
        update=2,
        phase="periodic",
        status=ReceiptStatus.SUBMISSION_FAILED,
        error_type="ServiceUnreachable",
        error="Temporal does not answer",
    )
    record = SubmissionRecord(run=desk.run, submission=failed, snapshot=snapshot)
    await submit.record_submission(record, "code")
    receipt = desk.receipt(2)
    assert receipt.status is ReceiptStatus.SUBMISSION_FAILED
    assert receipt.experiment_id == claimed.experiment_id
    assert (receipt.snapshot, receipt.phase) == (snapshot, "periodic")
    desk.store.write_bytes(f"{snapshot.folder}/{layout.SNAPSHOT_COMPLETE}", b"")
    rel = layout.eval_receipt(2, evaluation_key(evaluation_tasks(desk.spec)))
    again = prepare_resubmission(f"{desk.store.root}/{rel}")
    assert again.order.snapshot == snapshot
    assert again.receipt.resubmission_of == rel


def test_garbage_is_no_receipt(desk: Desk) -> None:
    rel = layout.eval_receipt(2, "0" * 16)
    desk.store.write_bytes(rel, b"{")
    with pytest.raises(ContractViolation, match="not an evaluation receipt"):
        read_receipt(desk.store, rel)
    assert list(receipts(desk.store)) == []
    with pytest.raises(ContractViolation, match="not the name"):
        key_of("evaluation/notes.json")
