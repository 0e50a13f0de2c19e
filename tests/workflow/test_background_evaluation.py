"""Background evaluation under the real workflow: snapshots, receipts, children, their ends."""

import asyncio
import json
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowHandle

from activities.background.receipts import receipts
from activities.storage import layout
from models.background import EvaluationReceipt
from models.errors import (
    ContractViolation,
    EngineLost,
    ServiceUnreachable,
    StorageFull,
    TrainerLost,
)
from models.run import RunState
from workers.cli.app import run_command
from workers.cli.place import Place
from workers.cli.receipts import prepare_resubmission, submit, summaries

pytestmark = pytest.mark.workflow


def background(stage: Any, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run of six updates, evaluated in background every second one; held-out data is there."""
    stage.store.write_bytes(layout.EVAL_JSONL, b'{"prompt": 1}\n')
    sections["training"] = {"num_rollouts": 6, "save_interval": 6} | sections.get("training", {})
    evaluation = {"mode": "background", "interval": 2}
    sections["evaluation"] = evaluation | sections.get("evaluation", {})
    document: dict[str, Any] = stage.document(**sections)
    return document


def receipts_of(stage: Any) -> dict[int, EvaluationReceipt]:
    return {receipt.update: receipt for _, receipt in receipts(stage.store)}


async def ends(stage: Any, *updates: int) -> None:
    """Wait until the evaluations of these updates have a result."""
    await stage.until(
        lambda: all(
            update in receipts_of(stage) and receipts_of(stage)[update].result is not None
            for update in updates
        )
    )


def child(stage: Any, update: int) -> WorkflowHandle[Any, Any]:
    handle: WorkflowHandle[Any, Any] = stage.client.get_workflow_handle(
        receipts_of(stage)[update].experiment_id
    )
    return handle


def calls(stage: Any, *names: str) -> list[str]:
    return [call for call in stage.fleet.log if call.startswith(names)]


async def test_every_due_update_is_evaluated_from_its_snapshot(stage: Any) -> None:
    """Total 6, interval 2: milestones 0, 2, 4, 6. The run's own engines sample none of them."""
    document = background(stage)
    gates = [stage.fleet.script.hold(f"optimize {update}") for update in (2, 4)]
    handle = await stage.start(document)
    await ends(stage, 0)
    for gate, due in zip(gates, (2, 4), strict=True):
        await ends(stage, due)
        gate.set()
    assert (await handle.result()).state is RunState.COMPLETE
    await ends(stage, 6)
    assert not [call for call in stage.fleet.log if call.startswith("evaluate ")]
    found = receipts_of(stage)
    assert sorted(found) == [0, 2, 4, 6]
    assert {receipt.status for receipt in found.values()} == {"submitted"}
    assert [found[update].phase for update in (0, 2, 4, 6)] == [
        "initial", "periodic", "periodic", "final",
    ]  # fmt: skip
    for update, receipt in found.items():
        assert receipt.snapshot is not None
        assert receipt.snapshot.policy_version == update
        assert receipt.training == {
            "name": stage.name,
            "root": str(stage.root),
            "run_id": f"train/{stage.name}",
            "spec_sha256": receipt.training["spec_sha256"],
        }
        assert receipt.code_sha256 == "tests"
        assert receipt.result == {
            "status": "complete",
            "folder": layout.eval_results(
                layout.eval_receipt(update, receipt.group_id),
            ),
            "reward": 0.25 + 0.01 * update,
        }
    folder = f"{stage.root}/eval-snapshots/update-00000006/hf"
    assert found[6].checkpoint == folder
    assert found[0].checkpoint == f"{stage.root}/prepared/hf"
    assert stage.store.read_bytes("eval-snapshots/update-00000006/hf/.complete") == b""
    assert stage.store.read_bytes("eval-snapshots/update-00000006/hf/model.safetensors") == b"6"
    reference = stage.store.read_json("eval-snapshots/update-00000000/reference.json")
    assert (reference["update"], reference["reuse_initial_hf"]) == (0, True)
    assert reference["checkpoint"] == f"{stage.root}/prepared/hf"
    # Evaluated ones are gone, the newest and the initial reference stay.
    assert stage.store.list("eval-snapshots") == ["update-00000000", "update-00000006"]


async def test_results_lie_in_the_metrics_and_under_the_root(stage: Any) -> None:
    document = background(stage, training={"num_rollouts": 1}, evaluation={"initial": False})
    await stage.run(document)
    await ends(stage, 1)
    (row,) = stage.rows("eval")
    assert (row["eval/step"], row["eval/checkpoint_update"], row["update"]) == (1, 1, 1)
    assert row["eval/heldout"] == pytest.approx(0.26)
    assert [each["eval/heldout"] for each in stage.tracker.rows if "eval/step" in each] == [
        row["eval/heldout"]
    ]
    result = receipts_of(stage)[1].result
    assert result is not None
    folder = stage.root / result["folder"]
    state = json.loads((folder / "evaluation.json").read_text())
    scores = json.loads((folder / "scores.json").read_text())
    provenance = json.loads((folder / "provenance.json").read_text())
    assert state["status"] == "complete"
    assert scores["scores"]["eval/heldout"] == pytest.approx(0.26)
    snapshot = receipts_of(stage)[1].snapshot
    assert snapshot is not None
    assert provenance["snapshot_digest"] == snapshot.digest
    assert provenance["eval_sha256"] == stage.store.sha256(layout.EVAL_JSONL)
    assert state["result_key"] == scores["result_key"] == provenance["result_key"]
    assert json.loads((folder / "publication.json").read_text()) == {"status": "published"}


async def test_the_run_ends_while_its_evaluation_goes_on(stage: Any) -> None:
    gate = stage.fleet.script.hold("evaluate_snapshot 1")
    document = background(stage, training={"num_rollouts": 1}, evaluation={"initial": False})
    outcome = await stage.run(document)
    assert outcome.state is RunState.COMPLETE
    assert outcome.submission is not None
    assert (outcome.submission.update, outcome.submission.status) == (1, "submitted")
    assert stage.fleet.torn_down
    await stage.fleet.script.reached("evaluate_snapshot 1")
    described = await child(stage, 1).describe()
    assert described.status is WorkflowExecutionStatus.RUNNING
    gate.set()
    report = await child(stage, 1).result()
    assert report["reward_mean"] == pytest.approx(0.26)
    assert receipts_of(stage)[1].result["status"] == "complete"  # type: ignore[index]


async def test_a_busy_evaluator_skips_periodic_ones_and_the_final_one_waits(stage: Any) -> None:
    gate = stage.fleet.script.hold("evaluate_snapshot 2")
    document = background(stage, evaluation={"initial": False})
    assert (await stage.run(document)).state is RunState.COMPLETE
    await stage.fleet.script.reached("evaluate_snapshot 2")
    found = receipts_of(stage)
    assert {update: receipt.status.value for update, receipt in found.items()} == {
        2: "submitted", 4: "skipped_busy", 6: "submitted",
    }  # fmt: skip
    assert stage.evaluators.num_open == 1
    assert not calls(stage, "evaluate_snapshot 6")
    gate.set()
    await ends(stage, 2, 6)
    assert calls(stage, "evaluate_snapshot") == ["evaluate_snapshot 2", "evaluate_snapshot 6"]
    assert receipts_of(stage)[4].result is None


async def test_the_deadline_evaluates_the_actual_last_update(stage: Any) -> None:
    document = background(
        stage,
        core={"max_run_seconds": 0.001},
        training={"num_rollouts": 50, "save_interval": 20},
        evaluation={"interval": 20, "initial": False},
    )
    outcome = await stage.run(document)
    assert outcome.stopped_for_time
    await ends(stage, 1)
    assert {update: receipt.phase for update, receipt in receipts_of(stage).items()} == {1: "final"}


async def test_lost_engines_and_workers_cost_the_evaluation_an_attempt(stage: Any) -> None:
    stage.fleet.script.fail(
        "evaluate_snapshot 1", EngineLost("killed"), ServiceUnreachable("no answer")
    )
    document = background(stage, training={"num_rollouts": 1}, evaluation={"initial": False})
    await stage.run(document)
    await ends(stage, 1)
    assert receipts_of(stage)[1].result["status"] == "complete"  # type: ignore[index]
    assert calls(stage, "evaluate_snapshot", "prepared") == [
        "prepared 0 trainer,producer", *["evaluate_snapshot 1"] * 3,
    ]  # fmt: skip


async def test_a_failed_evaluation_is_on_record_and_fails_no_run(stage: Any) -> None:
    stage.fleet.script.fail("evaluate_snapshot 2", ContractViolation("garbage"))
    outcome = await stage.run(background(stage, evaluation={"initial": False}))
    assert outcome.state is RunState.COMPLETE
    await ends(stage, 2, 6)
    result = receipts_of(stage)[2].result
    assert result is not None
    assert (result["status"], result["error"]) == ("failed", "ContractViolation: garbage")
    state = json.loads((stage.root / result["folder"] / "evaluation.json").read_text())
    assert state["status"] == "failed"
    described = await child(stage, 2).describe()
    assert described.status is WorkflowExecutionStatus.FAILED
    # It may be asked for again, so its snapshot stays.
    assert stage.store.exists("eval-snapshots/update-00000002/hf/.complete")


async def test_a_cancelled_evaluation_is_on_record(stage: Any) -> None:
    stage.fleet.script.hold("evaluate_snapshot 1")
    document = background(stage, training={"num_rollouts": 1}, evaluation={"initial": False})
    await stage.run(document)
    await stage.fleet.script.reached("evaluate_snapshot 1")
    await child(stage, 1).cancel()
    await ends(stage, 1)
    assert receipts_of(stage)[1].result["status"] == "failed"  # type: ignore[index]
    await stage.until(lambda: stage.evaluators.num_open == 0)
    async with asyncio.timeout(10):
        while (await child(stage, 1).describe()).status is WorkflowExecutionStatus.RUNNING:
            await asyncio.sleep(0.02)
    assert (await child(stage, 1).describe()).status is WorkflowExecutionStatus.CANCELED


async def test_a_snapshot_that_cannot_be_stored_fails_no_run(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from activities.background import snapshot

    def full(*_: Any) -> str:
        raise StorageFull("no space left")

    monkeypatch.setattr(snapshot, "_stage", full)
    document = background(stage, training={"num_rollouts": 2}, evaluation={"initial": False})
    outcome = await stage.run(document)
    assert outcome.state is RunState.COMPLETE
    receipt = receipts_of(stage)[2]
    assert receipt.status == "submission_failed"
    assert receipt.error == {"type": "StorageFull", "message": "no space left"}
    assert outcome.submission is not None
    assert outcome.submission.error_type == "StorageFull"


async def test_a_trainer_lost_at_the_snapshot_is_rebuilt(stage: Any) -> None:
    document = background(stage, training={"save_interval": 2}, evaluation={"initial": False})
    gate = stage.fleet.script.hold("save 1")
    handle = await stage.start(document)
    await stage.fleet.script.reached("save 1")
    stage.fleet.script.fail("export_weights 2", TrainerLost("killed"))
    gate.set()
    assert (await handle.result()).state is RunState.COMPLETE
    await ends(stage, 2)
    assert (await stage.progress()).recoveries == 1


async def test_a_rewind_evaluates_nothing_twice(stage: Any) -> None:
    """What was evaluated and is then redone has a receipt already."""
    stage.fleet.script.fail("optimize 4", TrainerLost("killed"))
    document = background(stage, training={"save_interval": 3}, evaluation={"initial": False})
    outcome = await stage.run(document)
    assert outcome.state is RunState.COMPLETE
    # Update 4 was handed over, then redone from the checkpoint after update 3.
    assert calls(stage, "prepared")[1] == "prepared 3 trainer,producer"
    assert calls(stage, "optimize 3") == ["optimize 3", "optimize 3"]
    orders = [order.snapshot.update for order in stage.evaluators.orders]
    assert sorted(set(orders)) == sorted(orders)


async def test_a_failed_evaluation_is_resubmitted_by_hand(
    stage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.fleet.script.fail("evaluate_snapshot 1", ContractViolation("garbage"))
    document = background(stage, training={"num_rollouts": 1}, evaluation={"initial": False})
    await stage.run(document)
    await ends(stage, 1)
    (failed,) = summaries(str(stage.root))
    resubmission = prepare_resubmission(str(stage.root / failed["receipt"]))
    place = Place(stage.client.service_client.config.target_host)
    done = await submit(place, resubmission)
    assert done.status == "submitted"
    report = await stage.client.get_workflow_handle(done.experiment_id).result()
    assert report["update"] == 1
    capsys.readouterr()
    assert run_command(["evaluation", "list", str(stage.root), "--json"]) == 0
    first, again = json.loads(capsys.readouterr().out)["evaluations"]
    assert first == failed
    assert (first["result"], again["result"]) == ("failed", "complete")
    assert again["resubmission_of"] == first["receipt"]
    assert again["receipt"] == done.receipt
    assert again["receipt"].startswith(first["receipt"].removesuffix(".json") + "-manual-")
    assert again["experiment_id"] != first["experiment_id"]
    assert again["reward"] == pytest.approx(0.26)
