"""``perdure evaluation``: what it shows, and what it refuses before any server is asked."""

import json
from pathlib import Path
from typing import Any

import pytest

from activities.background.receipts import encoded
from activities.storage import layout
from activities.storage.store import Store
from configs.load import resolve_document
from models.background import EvaluationReceipt, SnapshotRef
from models.evaluation import ReceiptStatus
from workers.cli.app import run_command
from workers.cli.errors import DONE, FAILED, USAGE
from workers.cli.receipts import prepare_resubmission

KEY = "0123456789abcdef"
NOBODY = "127.0.0.1:9"


class Root:
    """An output root with receipts."""

    def __init__(self, root: Path) -> None:
        document = {
            "schema_version": 1,
            "name": "shown",
            "model": {"source": "tiny", "tiny": {}},
            "data": {"tasks": [{"task": "reverse_word", "train_count": 8, "eval_count": 2}]},
            "output": {"root": str(root)},
            "training": {"num_rollouts": 6},
            "evaluation": {"mode": "background", "interval": 2},
        }
        self.loaded = resolve_document(document, origin="test")
        self.store, self.path = Store(root), root
        self.store.write_json(layout.RESOLVED_CONFIG, self.loaded.document)

    def receipt(self, update: int, status: ReceiptStatus, **fields: Any) -> str:
        receipt = EvaluationReceipt(
            update=update,
            status=status,
            phase="periodic",
            snapshot=SnapshotRef(
                update=update,
                policy_version=update,
                folder=layout.eval_snapshot(update),
                digest="d" * 64,
                num_bytes=1,
            ),
            training={"run_id": "train/shown", "spec_sha256": self.loaded.sha256},
        )
        rel = layout.eval_receipt(update, KEY)
        self.store.write_bytes(rel, encoded(receipt.model_copy(update=fields)))
        return str(self.path / rel)

    def snapshot(self, update: int) -> None:
        self.store.write_bytes(f"{layout.eval_snapshot(update)}/.complete", b"")


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path / "root")


def test_the_list_tells_states_scores_and_what_to_do(
    root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    root.receipt(
        2,
        ReceiptStatus.SUBMITTED,
        result={"status": "complete", "folder": "evaluation/x", "reward": 0.625},
    )
    root.receipt(4, ReceiptStatus.SKIPPED_BUSY)
    root.receipt(
        6, ReceiptStatus.SUBMISSION_FAILED, error={"type": "StorageFull", "message": "no space"}
    )
    assert run_command(["evaluation", "list", str(root.path), "--json"]) == DONE
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    report = json.loads(out)
    assert [(row["update"], row["status"], row["result"]) for row in report["evaluations"]] == [
        (2, "submitted", "complete"),
        (4, "skipped_busy", None),
        (6, "submission_failed", None),
    ]
    assert report["evaluations"][0]["reward"] == 0.625
    run_file = root.path.parent / "run.json"
    run_file.write_text(json.dumps(root.loaded.document))
    assert run_command(["evaluation", "list", str(run_file)]) == DONE
    shown = capsys.readouterr().out
    assert "0.625" in shown
    assert "update 6: StorageFull: no space" in shown
    again = f"{root.path}/evaluation/update-00000006-{KEY}.json"
    assert f"submit again: perdure evaluation resubmit {again}" in shown


def test_a_run_without_receipts_says_so(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["evaluation", "list", str(root.path)]) == DONE
    assert "no background evaluation was submitted" in capsys.readouterr().out
    assert run_command(["evaluation", "list", str(root.path / "gone")]) == USAGE
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"), [(b"{", "Invalid JSON"), (b'{"update": 3}', "status: Field required")]
)
def test_a_damaged_receipt_is_named_and_the_others_are_shown(
    root: Root, capsys: pytest.CaptureFixture[str], content: bytes, reason: str
) -> None:
    root.receipt(2, ReceiptStatus.SKIPPED_BUSY)
    rel = layout.eval_receipt(3, KEY)
    root.store.write_bytes(rel, content)
    assert run_command(["evaluation", "list", str(root.path), "--json"]) == DONE
    shown = capsys.readouterr()
    assert [row["update"] for row in json.loads(shown.out)["evaluations"]] == [2]
    assert f"warning: {root.path}/{rel} is not an evaluation receipt: {reason}" in shown.err
    assert run_command(["evaluation", "resubmit", str(root.path / rel)]) == USAGE
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("evaluation/update-00000009-0123456789abcdef.json", "perdure evaluation list"),
        ("evaluation/notes.json", "not the name of an evaluation receipt"),
        ("elsewhere/update-00000002-0123456789abcdef.json", "not the path of a receipt"),
        ("update-00000002-0123456789abcdef.json", "not the path of a receipt"),
    ],
)
def test_what_is_no_receipt_is_refused(
    root: Root, capsys: pytest.CaptureFixture[str], name: str, wrong: str
) -> None:
    root.receipt(2, ReceiptStatus.SUBMITTED)
    assert run_command(["evaluation", "resubmit", str(root.path / name)]) == USAGE
    assert wrong in capsys.readouterr().err


def test_an_incomplete_snapshot_is_refused(root: Root, capsys: pytest.CaptureFixture[str]) -> None:
    path = root.receipt(2, ReceiptStatus.SUBMITTED)
    assert run_command(["evaluation", "resubmit", path]) == USAGE
    assert "has no .complete" in capsys.readouterr().err
    path = root.receipt(4, ReceiptStatus.SUBMISSION_FAILED, snapshot=None)
    assert run_command(["evaluation", "resubmit", path]) == USAGE
    assert "names no snapshot" in capsys.readouterr().err


def test_without_a_server_nothing_is_written(
    root: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root.receipt(2, ReceiptStatus.SUBMITTED)
    root.snapshot(2)
    code = run_command(["evaluation", "resubmit", path, "--address", NOBODY])
    assert code not in (DONE, FAILED)
    assert NOBODY in capsys.readouterr().err
    assert root.store.list("evaluation") == [f"update-00000002-{KEY}.json"]


def test_a_resubmission_has_names_of_its_own(root: Root) -> None:
    path = root.receipt(2, ReceiptStatus.SUBMITTED, experiment_id="train/shown/evaluation/first")
    root.snapshot(2)
    one, other = prepare_resubmission(path), prepare_resubmission(path)
    assert one.order.receipt != other.order.receipt
    assert len({one.experiment_id, other.experiment_id, "train/shown/evaluation/first"}) == 3
    assert one.receipt.resubmission_of == f"evaluation/update-00000002-{KEY}.json"
    assert one.order.run.root == str(root.path)
    assert one.order.after is None
    # One of a resubmission belongs to the same first receipt by its name.
    root.store.write_bytes(one.order.receipt, encoded(one.receipt))
    third = prepare_resubmission(str(root.path / one.order.receipt))
    assert third.order.receipt.startswith(f"evaluation/update-00000002-{KEY}-manual-")
    assert third.order.receipt.count("-manual-") == 1
