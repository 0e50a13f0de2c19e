"""Firings of a scheduled retraining: real workflows and activities, the fleet faked."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import ApplicationError

from activities.storage import layout
from activities.storage.store import Store
from models.checkpoint import RewindRequest
from models.errors import NonFiniteLoss
from models.retraining import Decision, RetrainingOutcome
from models.run import StopRequest
from tests.support.retraining_rig import RetrainingDesk, RetrainingFleet
from workers.cli.place import Place
from workers.cli.rewind_session import RewindSession
from workflows.options import CONTROL_QUEUE

pytestmark = pytest.mark.workflow


class Firings:
    """Starts firings as a schedule does, under the ids that it would give them."""

    def __init__(self, stage: Any, desk: RetrainingDesk) -> None:
        self.stage, self.desk = stage, desk
        self.fleet: RetrainingFleet = stage.fleet

    async def start(self, time: str, given: Any = None) -> Any:
        request = self.desk.request() if given is None else given
        handle = await self.stage.client.start_workflow(
            "Retraining",
            request,
            result_type=RetrainingOutcome,
            id=f"retrain/{self.desk.name}-2026-01-05T{time}Z",
            task_queue=CONTROL_QUEUE,
        )
        self.stage.handles.append(handle)
        return handle

    async def fire(self, time: str, given: Any = None) -> RetrainingOutcome:
        handle = await self.start(time, given)
        async with asyncio.timeout(30):
            outcome: RetrainingOutcome = await handle.result()
        return outcome

    async def refused(self, time: str, given: Any = None) -> ApplicationError:
        handle = await self.start(time, given)
        return await failure_of(handle)

    async def until_waiting(self, handle: Any) -> None:
        """Until the firing waits for a run that it did not start."""
        async with asyncio.timeout(20):
            while True:
                pending = (await handle.describe()).raw_description.pending_activities
                if any(each.activity_type.name == "await_training" for each in pending):
                    return
                await asyncio.sleep(0.05)

    def record(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self.desk.store.read_json(layout.lineage_record(number))
        return found

    def trained(self) -> int:
        """How many optimizer calls there were, over all runs."""
        return sum(entry.startswith("optimize ") for entry in self.fleet.log)


async def failure_of(handle: Any) -> ApplicationError:
    async with asyncio.timeout(30):
        with pytest.raises(WorkflowFailureError) as error:
            await handle.result()
    cause = error.value.cause
    assert isinstance(cause, ApplicationError), repr(cause)
    return cause


@pytest.fixture
async def firings(make_stage: Callable[..., Any]) -> Firings:
    stage = await make_stage(fleet_class=RetrainingFleet)
    return Firings(stage, RetrainingDesk(stage.root, stage.name, stage.name))


async def test_a_better_model_is_promoted_and_the_next_firing_starts_from_it(
    firings: Firings,
) -> None:
    desk, fleet = firings.desk, firings.fleet
    first = desk.add_data("a.jsonl")
    fleet.scores(0.25, 0.5)
    outcome = await firings.fire("03:00:00")
    assert outcome.decision is Decision.PROMOTED
    assert outcome.reason == "eval/heldout 0.5 after 0.25, better by 0.25, tolerance 0, n = 1"
    name = f"{desk.name}-2026-01-05T030000"
    assert outcome.run_id == f"train/{name}Z"
    export = desk.root / "runs" / f"{name}Z" / "export-hf"
    pointer = desk.pointer()
    assert pointer is not None
    assert (pointer["export"], pointer["record"]) == (str(export), 1)
    lines = "".join(
        f"{hashlib.sha256((export / file).read_bytes()).hexdigest()}  {file}\n"
        for file in ("config.json", "model.safetensors")
    )
    assert pointer["digest"] == hashlib.sha256(lines.encode()).hexdigest()

    second = desk.add_data("b.jsonl")
    fleet.scores(0.5, 0.375)
    worse = await firings.fire("04:00:00")
    assert worse.decision is Decision.REFUSED
    assert worse.reason == (
        "regression: eval/heldout 0.375 after 0.5, worse by 0.125, tolerance 0, n = 1"
    )
    assert desk.pointer() == pointer

    one, two = firings.record(1), firings.record(2)
    assert [each["url"] for each in one["data"]["files"]] == [str(first)]
    assert [each["url"] for each in two["data"]["files"]] == [str(second)]
    assert one["data"]["sha256"] == hashlib.sha256(first.read_bytes()).hexdigest()
    assert one["parent"]["source"] == str(desk.folder / "base")
    assert two["parent"] == {
        "source": str(export),
        "digest": pointer["digest"],
        "run_id": outcome.run_id,
        "record": 1,
    }
    run_file = Store(two["run_root"]).read_json(layout.RESOLVED_CONFIG)
    assert run_file["model"]["source"] == str(export)
    assert two["checkpoint"]["folder"].startswith("checkpoints/core/rollout_0000001")
    assert two["export"]["digest"] != ""
    assert (two["comparison"]["parent"], two["comparison"]["candidate"]) == (0.5, 0.375)
    assert two["comparison"]["data_sha256"] == "e" * 64


async def test_without_new_data_nothing_is_done(firings: Firings) -> None:
    desk = firings.desk
    nothing = await firings.fire("01:00:00")
    assert nothing.decision is Decision.NOTHING_TO_DO
    assert nothing.reason == f"no file matches {desk.new}/*.jsonl"
    desk.add_data("a.jsonl")
    firings.fleet.scores(0.5, 0.25)
    assert (await firings.fire("02:00:00")).decision is Decision.REFUSED
    trained = firings.trained()
    desk.add_data("copy.jsonl", (desk.new / "a.jsonl").read_text())
    desk.add_data("empty.jsonl", "")
    again = await firings.fire("03:00:00")
    assert again.decision is Decision.NOTHING_TO_DO
    assert again.reason == (
        f"no new data: of 3 files of {desk.new}/*.jsonl, 2 were trained on before, "
        "1 empty or being written"
    )
    assert firings.trained() == trained
    assert desk.store.list(layout.LINEAGE) == ["00000001.json"]
    assert desk.pointer() is None


async def test_a_repeated_firing_never_trains_twice(firings: Firings) -> None:
    firings.desk.add_data("a.jsonl")
    firings.fleet.scores(0.25, 0.5)
    outcome = await firings.fire("03:00:00")
    trained = firings.trained()
    assert trained == 2
    firings.desk.add_data("b.jsonl")
    assert await firings.fire("03:00:00") == outcome
    assert firings.trained() == trained


async def test_a_firing_whose_decision_is_missing_decides_and_does_not_train(
    firings: Firings,
) -> None:
    """As after a termination between the end of the run and the decision."""
    desk = firings.desk
    desk.add_data("a.jsonl")
    firings.fleet.scores(0.25, 0.5)
    first = await firings.fire("03:00:00")
    desk.store.remove_tree(layout.lineage_record(1))
    desk.store.remove_tree(layout.LATEST_EXPORT)
    trained = firings.trained()
    assert await firings.fire("03:00:00") == first
    assert firings.trained() == trained
    assert desk.pointer() is not None


async def test_a_run_that_is_there_already_is_joined(firings: Firings) -> None:
    desk = firings.desk
    desk.add_data("a.jsonl")
    firings.fleet.scores(0.25, 0.5)
    firings.fleet.script.fail("optimize 1", NonFiniteLoss("planted"))
    failure = await firings.refused("03:00:00")
    assert failure.type == "TrainingFailed"
    assert "NonFiniteLoss: planted" in failure.message
    assert firings.record(1)["decision"] == "failed"
    assert desk.pointer() is None
    plan = desk.store.read_json(f"firings/{desk.name}-2026-01-05T030000Z/firing.json")
    gate = firings.fleet.script.hold("export")
    await firings.stage.client.start_workflow(
        "Training", plan["training"], id=failure.message.partition(":")[0],
        task_queue=CONTROL_QUEUE,
    )  # fmt: skip
    await firings.fleet.script.reached("export")
    handle = await firings.start("03:00:00")
    await firings.until_waiting(handle)
    gate.set()
    outcome = await handle.result()
    assert (outcome.decision, outcome.record) == (Decision.PROMOTED, 2)


def rewinding(firings: Firings, updates: int) -> Any:
    """A rewind of the run of the firing at three o'clock."""
    place = Place(firings.stage.client.service_client.config.target_host)
    run_id = f"train/{firings.desk.name}-2026-01-05T030000Z"
    session = RewindSession(place, run_id, RewindRequest(updates=updates), None, run_id, ())
    return asyncio.create_task(session.run(StopRequest(reason="back"), 30))


async def rewound_firing(firings: Firings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A firing whose run was stopped after three updates of four and goes on after one."""
    monkeypatch.setenv("PERDURE_LAUNCH_RECEIPTS", str(tmp_path / "launches"))
    desk, script = firings.desk, firings.fleet.script
    desk.add_data("a.jsonl")
    firings.fleet.scores(0.25, 0.5)
    sections = {
        "training": {"num_rollouts": 4, "save_interval": 1},
        "core": {"checkpoint_keep_last": None},
    }
    gate = script.hold("collect 2")
    handle = await firings.start("03:00:00", desk.request(config=desk.document(**sections)))
    await script.reached("collect 2")
    going = rewinding(firings, 1)
    run = firings.stage.client.get_workflow_handle(f"train/{desk.name}-2026-01-05T030000Z")
    async with asyncio.timeout(20):
        while (await run.query("progress"))["stop"] is None:
            await asyncio.sleep(0.05)
    held = script.hold("collect 3")
    gate.set()
    await asyncio.wait_for(going, 30)
    await script.reached("collect 3")
    return handle, held


async def test_a_firing_waits_for_its_run_when_it_is_rewound(
    firings: Firings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, held = await rewound_firing(firings, tmp_path, monkeypatch)
    await firings.until_waiting(handle)
    assert firings.desk.store.list(layout.LINEAGE) == []
    held.set()
    outcome = await asyncio.wait_for(handle.result(), 30)
    assert (outcome.decision, outcome.record) == (Decision.PROMOTED, 1)
    assert outcome.reason == "eval/heldout 0.5 after 0.25, better by 0.25, tolerance 0, n = 1"
    assert firings.trained() == 6  # of four updates two again
    assert firings.desk.store.list(layout.LINEAGE) == ["00000001.json"]


async def test_a_canceled_firing_stops_its_run_also_after_a_rewind(
    firings: Firings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, _ = await rewound_firing(firings, tmp_path, monkeypatch)
    await firings.until_waiting(handle)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await asyncio.wait_for(handle.result(), 30)
    assert (await handle.describe()).status is WorkflowExecutionStatus.CANCELED
    run = firings.stage.client.get_workflow_handle(f"train/{firings.desk.name}-2026-01-05T030000Z")
    assert (await run.describe()).status is WorkflowExecutionStatus.CANCELED
    assert firings.desk.store.list(layout.LINEAGE) == []


async def test_a_run_of_a_firing_has_the_hard_limit_of_its_file(firings: Firings) -> None:
    desk = firings.desk
    desk.add_data("a.jsonl")
    firings.fleet.script.hold("collect 1")
    limited = desk.request(config=desk.document(launch={"timeout_s": 600.0}))
    handle = await firings.start("03:00:00", limited)
    await firings.fleet.script.reached("collect 1")
    run = firings.stage.client.get_workflow_handle(f"train/{desk.name}-2026-01-05T030000Z")
    limit = (await run.describe()).raw_description.execution_config.workflow_execution_timeout
    assert limit.ToTimedelta().total_seconds() == 600.0
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()


async def test_a_failed_firing_leaves_its_data_new(firings: Firings) -> None:
    path = firings.desk.add_data("a.jsonl")
    firings.fleet.scores(0.25, 0.5)
    firings.fleet.script.fail("optimize 0", NonFiniteLoss("planted"))
    await firings.refused("03:00:00")
    outcome = await firings.fire("04:00:00")
    assert outcome.decision is Decision.PROMOTED
    assert [each["url"] for each in firings.record(2)["data"]["files"]] == [str(path)]


async def test_a_run_that_is_refused_its_root_is_a_failed_firing(firings: Firings) -> None:
    firings.desk.add_data("a.jsonl")
    firings.desk.store.write_bytes("runs", b"a file where runs shall be")
    failure = await firings.refused("03:00:00")
    assert failure.type == "TrainingFailed"
    assert "ConfigurationError" in failure.message
    record = firings.record(1)
    assert (record["decision"], record["checkpoint"], record["export"]) == ("failed", None, None)


async def test_a_canceled_firing_stops_its_run(firings: Firings) -> None:
    firings.desk.add_data("a.jsonl")
    firings.fleet.scores(0.25, 0.5)
    firings.fleet.script.hold("collect 1")
    handle = await firings.start("03:00:00")
    await firings.fleet.script.reached("collect 1")
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    described = await handle.describe()
    assert described.status is WorkflowExecutionStatus.CANCELED
    run = firings.stage.client.get_workflow_handle(f"train/{firings.desk.name}-2026-01-05T030000Z")
    assert (await run.describe()).status is WorkflowExecutionStatus.CANCELED
    assert firings.fleet.torn_down
    assert firings.desk.store.list(layout.LINEAGE) == []
    firings.fleet.script.gates.clear()
    again = await firings.fire("03:00:00")
    assert again.decision is Decision.PROMOTED


async def test_two_firings_at_once_cannot_both_replace_one_parent(firings: Firings) -> None:
    """Only with another overlap policy than skip: the second one was compared with old weights."""
    desk = firings.desk
    desk.add_data("a.jsonl")
    firings.fleet.scores(0.25, 0.5)
    gate = firings.fleet.script.hold("export")
    slow = await firings.start("03:00:00")
    await firings.fleet.script.reached("export")
    plan = desk.store.read_json(f"firings/{desk.name}-2026-01-05T030000Z/firing.json")
    rival = {
        "number": 1, "firing": "rival", "run_id": "train/rival", "run_root": "/data/rival",
        "decision": "promoted", "reason": "planted", "config_sha256": "", "recorded_unix": 1.0,
        "data": plan["data"], "parent": plan["parent"],
        "export": {"path": "/data/rival", "digest": "d", "files": []},
        "comparison": {
            "metric": "eval/heldout", "higher_is_better": True, "tolerance": 0, "parent": 0.1,
            "candidate": 0.9, "updates": 2, "max_unscored_fraction": 0, "parent_unscored": 0,
            "candidate_unscored": 0, "data_sha256": "e",
        },
    }  # fmt: skip
    desk.store.write_json(layout.lineage_record(1), rival)
    gate.set()
    outcome = await slow.result()
    assert outcome.decision is Decision.REFUSED
    assert outcome.reason.startswith("record 1 was promoted since")
    pointer = desk.pointer()
    assert pointer is not None
    assert pointer["firing"] == "rival"


async def test_an_altered_parent_ends_the_firing_before_it_trains(firings: Firings) -> None:
    desk = firings.desk
    desk.add_data("a.jsonl")
    firings.fleet.scores(0.25, 0.5)
    export = (await firings.fire("03:00:00")).export
    Store(export).write_bytes("model.safetensors", b"another")
    desk.add_data("b.jsonl")
    trained = firings.trained()
    failure = await firings.refused("04:00:00")
    assert failure.type == "DigestMismatch"
    assert export in failure.message
    assert firings.trained() == trained


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "the workflow input has no 'config'"),
        ([1], "must be a JSON object, not list"),
        ({"data": 3}, "the workflow input is wrong: data"),
    ],
)
async def test_an_input_that_is_no_request_fails_the_firing(
    firings: Firings, given: Any, message: str
) -> None:
    failure = await firings.refused("03:00:00", given)
    assert failure.type == "ConfigurationError"
    assert message in failure.message


async def test_a_wrong_data_file_is_named_before_anything_is_trained(firings: Firings) -> None:
    path = firings.desk.add_data("a.jsonl", json.dumps({"prompt": "x", "answer": "1"}) + "\n{\n")
    failure = await firings.refused("03:00:00")
    assert failure.type == "ConfigurationError"
    assert f"{path} line 2: malformed JSON" in failure.message
    assert firings.fleet.log == []
